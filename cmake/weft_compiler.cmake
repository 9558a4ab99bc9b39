# How every translation unit of the project is compiled.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# C is spoken by the tests and examples of weft/c.h only.
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Relative run paths let a build or an installation be moved as a whole.
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)

# Data files are found relative to the library, so the distance between the two may not depend on
# the distribution's idea of a library folder.
set(CMAKE_INSTALL_LIBDIR lib CACHE PATH "Library folder below the prefix")
include(GNUInstallDirs)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

find_program(WEFT_CCACHE ccache)
mark_as_advanced(WEFT_CCACHE)
if(WEFT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${WEFT_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${WEFT_CCACHE})
endif()

add_compile_options(-Wall -Wextra -Wpedantic -Wshadow -Wconversion)
# Who only installs has a compiler of their own, and what a newer one warns of is not their doing.
if(WEFT_TESTS)
  add_compile_options(-Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 reports overlapping copies inside std::string that cannot happen (PR 105651).
  add_compile_options(-Wno-restrict)
else()
  # g++ leaves signedness out of -Wconversion; one set of rules for both compilers.
  add_compile_options(-Wno-sign-conversion)
  # C++20 allows a variadic macro to be called with nothing for the dots; clang 14 still objects.
  add_compile_options(-Wno-gnu-zero-variadic-macro-arguments)
endif()

if(WEFT_SANITIZE)
  add_compile_options(-fsanitize=${WEFT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${WEFT_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Instrumented code defeats the flow analysis of g++; -Wtsan warns about fences by principle.
    add_compile_options(-Wno-maybe-uninitialized -Wno-tsan)
  endif()
endif()

if(WEFT_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "WEFT_FUZZ needs clang; g++ has no libFuzzer")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
