#include "program.h"

#include <cstdio>
#include <cstdlib>

// Of all the libraries, too: no flags are needed to repeat what was found.
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
