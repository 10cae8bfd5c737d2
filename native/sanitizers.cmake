# Compiles and links all that follows with PYH2O_SANITIZE: llama.cpp, our files in it, and the extension.

set(SANITIZERS address undefined)
if(PYH2O_SANITIZE STREQUAL "thread")
    set(SANITIZERS thread)
    set(GGML_OPENMP OFF)  # the sanitizer does not see how the threads of libgomp wait for each other; ggml's own it does
elseif(PYH2O_SANITIZE STREQUAL "fuzzer")
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
        pyh2o_fail("only clang has libFuzzer; install it (Debian: apt install clang) and set CC=clang CXX=clang++.")
    endif()
elseif(NOT PYH2O_SANITIZE STREQUAL "address")
    pyh2o_fail("there is no sanitizer ${PYH2O_SANITIZE}; PYH2O_SANITIZE is address, thread or fuzzer.")
endif()

list(JOIN SANITIZERS "," SANITIZERS)
add_compile_options(-fsanitize=${SANITIZERS} -fno-omit-frame-pointer -O1 -g1)
add_compile_definitions(_GLIBCXX_ASSERTIONS)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_link_options(-fsanitize=${SANITIZERS})
endif()
# clang's libraries find the sanitizer in the program that loads them, where it is linked or preloaded
