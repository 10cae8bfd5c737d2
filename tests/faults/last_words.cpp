// What a process was doing when a signal ended it, in a file: the native frames, and before them what it had written to
// standard error, where that is a file, as pytest makes it: a failed assertion of ggml says there which one it was.

#include <execinfo.h>
#include <unistd.h>

#include <csignal>
#include <initializer_list>

namespace {

int file;
struct sigaction before[NSIG];

void copy_standard_error() {
    char text[4096];
    off_t at = 0;
    for (ssize_t size; (size = pread(STDERR_FILENO, text, sizeof(text), at)) > 0; at += size) {
        (void) !write(file, text, size);
    }
}

void tell(int number) {
    copy_standard_error();
    void * frames[40];
    backtrace_symbols_fd(frames, backtrace(frames, 40), file);
    sigaction(number, &before[number], nullptr);
    raise(number);
}

} // namespace

extern "C" void tell_last_words(int descriptor) {
    file = descriptor;
    void * frame;
    backtrace(&frame, 1); // loads what it needs, which nothing can do amid a crash
    struct sigaction action {};
    action.sa_handler = tell;
    action.sa_flags   = SA_ONSTACK;
    for (int number : { SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV }) {
        sigaction(number, &action, &before[number]);
    }
}
