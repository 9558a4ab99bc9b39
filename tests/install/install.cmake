# Installs the build, moves the result elsewhere, and there builds and runs programs in C++ and C that
# know nothing but find_package(weft), or pkg-config.
#
#   cmake -DBUILD=<build> -DVERSION=<x.y.z> -DWORK=<scratch folder> -DCOMPILER=<c++>
#         -DC_COMPILER=<cc> -DPKG_CONFIG=<pkg-config> -P install.cmake

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
foreach(header IN ITEMS weft/base.h weft/api.h weft/c.h)
  if(NOT header IN_LIST headers)
    message(FATAL_ERROR "${header} is not installed; these are: ${headers}")
  endif()
endforeach()
set(includes "")
foreach(header IN LISTS headers)
  string(APPEND includes "#include <${header}>\n")
endforeach()
file(WRITE ${WORK}/consumer/main.cc "#include <cstdio>
${includes}
int main() { std::puts(weft::version()); }
")
# One header is enough for a program in C++, and one for a program in C: each is a group of one.
file(WRITE ${WORK}/consumer/api.cc "#include <weft/api.h>

int main() {
  auto job = weft::api::join();
  float data[2] = {1, 2};
  return job && (*job)->group().all_reduce(data) && (*job)->leave() && data[1] == 2 ? 0 : 1;
}
")
file(WRITE ${WORK}/consumer/plain.c "#include <weft/c.h>

int main(void) {
  weft_group* group = 0;
  float data[2] = {1, 2};
  if (weft_join(0, &group) != WEFT_OK) return 1;
  if (weft_all_reduce(group, 0, data, 2, WEFT_FLOAT32, WEFT_SUM) != WEFT_OK) return 2;
  if (weft_leave(group) != WEFT_OK) return 3;
  weft_free(group);
  return data[1] == 2 ? 0 : 4;
}
")
file(WRITE ${WORK}/consumer/CMakeLists.txt "
cmake_minimum_required(VERSION 3.25)
project(consumer C CXX)
find_package(weft ${VERSION} REQUIRED)
add_executable(consumer main.cc)
add_executable(api api.cc)
add_executable(plain plain.c)
foreach(program IN ITEMS consumer api plain)
  target_link_libraries(\${program} PRIVATE weft::weft)
endforeach()
")
set(flags)
if(SANITIZE)
  set(flags -DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE} -DCMAKE_C_FLAGS=-fsanitize=${SANITIZE})
endif()
must(${CMAKE_COMMAND} -G Ninja -S ${WORK}/consumer -B ${WORK}/consumer/build
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_C_COMPILER=${C_COMPILER}
  "-DCMAKE_PREFIX_PATH=${prefix}" ${flags})
must(${CMAKE_COMMAND} --build ${WORK}/consumer/build)

must(${WORK}/consumer/build/consumer)
string(STRIP "${output}" output)
if(NOT output STREQUAL VERSION)
  message(FATAL_ERROR "the consumer says version '${output}', not '${VERSION}'")
endif()

must(${WORK}/consumer/build/api)
must(${WORK}/consumer/build/plain)

# The folder's name has a space, so what pkg-config prints is quoted for a shell.
set(sanitizer)
if(SANITIZE)
  set(sanitizer -fsanitize=${SANITIZE})
endif()
must(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${prefix}/lib/pkgconfig sh -c
  "eval '${C_COMPILER}' -std=c11 ${sanitizer} '${WORK}/consumer/plain.c' -o '${WORK}/plain' \
    \"$('${PKG_CONFIG}' --cflags --libs 'weft = ${VERSION}')\"")
must(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${prefix}/lib ${WORK}/plain)

must(${prefix}/bin/weft --version)
if(NOT output MATCHES "${VERSION}")
  message(FATAL_ERROR "weft --version says '${output}', not '${VERSION}'")
endif()
