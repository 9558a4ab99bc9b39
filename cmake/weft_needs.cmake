# What is missing is said in one line that says what to do, before CMake says it in many. Included
# before project(), which looks for the compilers.

function(weft_refuse)
  string(JOIN "" line ${ARGN})
  message(FATAL_ERROR "weft: ${line}")
endfunction()

if(NOT CMAKE_CXX_COMPILER AND NOT DEFINED ENV{CXX})
  find_program(WEFT_ANY_COMPILER NAMES c++ g++ clang++)
  mark_as_advanced(WEFT_ANY_COMPILER)
  if(NOT WEFT_ANY_COMPILER)
    weft_refuse("there is no C++ compiler: install g++ 12, clang 14 or a later one (Debian: "
      "apt-get install g++)")
  endif()
endif()

# The outside libraries that are not there, by the names of their Debian packages.
function(weft_need_packages)
  if(ARGN)
    string(JOIN " " packages ${ARGN})
    weft_refuse("libraries are missing that it is built with: install them (Debian: apt-get install "
      "${packages})")
  endif()
endfunction()
