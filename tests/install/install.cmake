# Installs the build, moves the result elsewhere, and there builds and runs a program that knows
# nothing but find_package(weft).
#
#   cmake -DBUILD=<build> -DVERSION=<x.y.z> -DWORK=<scratch folder> -DCOMPILER=<c++> -P install.cmake

cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE ${WORK})
set(prefix "${WORK}/moved to")

function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}\n${text}")
  endif()
  set(output "${text}" PARENT_SCOPE)
endfunction()

must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
# The build tree must not be needed, and neither must the place of installation.
file(RENAME ${WORK}/first ${prefix})

# The consumer includes every installed header, so none of them may need one that is not.
file(GLOB headers RELATIVE ${prefix}/include ${prefix}/include/weft/*.h)
if(NOT "weft/base.h" IN_LIST headers)
  message(FATAL_ERROR "weft/base.h is not installed; these are: ${headers}")
endif()
set(includes "")
foreach(header IN LISTS headers)
  string(APPEND includes "#include <${header}>\n")
endforeach()
file(WRITE ${WORK}/consumer/main.cc "#include <cstdio>
${includes}
int main() { std::puts(weft::version()); }
")
file(WRITE ${WORK}/consumer/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(consumer CXX)
find_package(weft ${VERSION} REQUIRED)
add_executable(consumer main.cc)
target_link_libraries(consumer PRIVATE weft::weft)
")
set(flags)
if(SANITIZE)
  set(flags -DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
endif()
must(${CMAKE_COMMAND} -G Ninja -S ${WORK}/consumer -B ${WORK}/consumer/build
  -DCMAKE_CXX_COMPILER=${COMPILER} "-DCMAKE_PREFIX_PATH=${prefix}" ${flags})
must(${CMAKE_COMMAND} --build ${WORK}/consumer/build)

must(${WORK}/consumer/build/consumer)
string(STRIP "${output}" output)
if(NOT output STREQUAL VERSION)
  message(FATAL_ERROR "the consumer says version '${output}', not '${VERSION}'")
endif()

must(${prefix}/bin/weft --version)
if(NOT output MATCHES "${VERSION}")
  message(FATAL_ERROR "weft --version says '${output}', not '${VERSION}'")
endif()
