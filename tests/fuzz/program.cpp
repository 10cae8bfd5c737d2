#include "program.h"

#include <cstdio>
#include <cstdlib>

// Options of the sanitizers, also for the libraries, so that repeating a finding needs no flags.
extern "C" const char * __ubsan_default_options();
extern "C" const char * __ubsan_default_options() {
    return "halt_on_error=1:print_stacktrace=1:suppressions=" SUPPRESSIONS;
}

void expect(bool holds, const char * what) {
    if (!holds) {
        std::fprintf(stderr, "this does not hold: %s\n", what);
        std::abort();
    }
}
