# Tries to break each rule of the module law in a tiny tree, with the project's own module
# function, and sees the attempt refused by name, file and line.
#
#   cmake -DCMAKE=<cmake/> -DWORK=<scratch folder> -DCOMPILER=<c++> -P law.cmake

cmake_minimum_required(VERSION 3.25)

set(tree ${WORK}/tree)
set(build ${WORK}/build)
set(failures 0)
file(REMOVE_RECURSE ${WORK})

# A lawful tree: `low` is shown by `mid` and so seen by `top`; `side` is seen by nobody. `mid` has
# two parts, of which `tcp` stands on `wire`, and a private header above both.
function(lawful_tree)
  file(REMOVE_RECURSE ${tree})
  file(WRITE ${tree}/CMakeLists.txt "
    cmake_minimum_required(VERSION 3.25)
    project(law VERSION 1.0 LANGUAGES CXX)
    find_package(Threads)
    include(GNUInstallDirs)
    set(WEFT_TESTS OFF)
    include(${CMAKE}/weft_module.cmake)
    add_subdirectory(src)
    set(WEFT_TESTS ON)
    weft_law_finish()")
  file(WRITE ${tree}/src/CMakeLists.txt "
    add_subdirectory(low)
    add_subdirectory(side)
    add_subdirectory(mid)
    add_subdirectory(top)
    weft_library()")
  foreach(module IN ITEMS low side mid top)
    file(WRITE ${tree}/src/${module}/${module}.h "#pragma once\n#include <vector>\n")
    file(WRITE ${tree}/src/${module}/${module}.cc "#include \"weft/${module}.h\"\n")
    file(WRITE ${tree}/src/${module}/${module}_test.cc "#include \"weft/${module}.h\"\n")
  endforeach()
  file(WRITE ${tree}/src/low/CMakeLists.txt "weft_module(low SOURCES low.cc TESTS low_test.cc)\n")
  file(WRITE ${tree}/src/side/CMakeLists.txt
    "weft_module(side USES low SOURCES side.cc TESTS side_test.cc)\n")
  file(WRITE ${tree}/src/mid/CMakeLists.txt
    "weft_module(mid\n  USES low side\n  PARTS wire tcp\n  SOURCES mid.cc tcp/lane.cc wire/frame.cc\n  TESTS mid_test.cc)\n")
  file(WRITE ${tree}/src/mid/mid.h "#pragma once\n#include \"weft/low.h\"\n#include <signal.h>\n")
  file(WRITE ${tree}/src/mid/mid.cc "#include \"weft/mid.h\"\n#include \"tcp/lane.h\"\n#include \"wire/frame.h\"\n#include \"signal.h\"\n")
  # Named like a header of the system's, which everyone may still include.
  file(WRITE ${tree}/src/mid/signal.h "#pragma once\n")
  file(WRITE ${tree}/src/mid/wire/frame.h "#pragma once\n#include <signal.h>\n")
  file(WRITE ${tree}/src/mid/wire/frame.cc "#include \"frame.h\"\n#include \"weft/mid.h\"\n")
  file(WRITE ${tree}/src/mid/tcp/lane.h "#pragma once\n#include \"wire/frame.h\"\n")
  file(WRITE ${tree}/src/mid/tcp/lane.cc "#include \"tcp/lane.h\"\n#include \"weft/side.h\"\n")
  file(WRITE ${tree}/src/top/CMakeLists.txt
    "weft_module(top\n  USES mid\n  SOURCES top.cc\n  TESTS top_test.cc)\n")
  file(APPEND ${tree}/src/top/top.cc "#include \"weft/mid.h\"\n#include \"weft/low.h\"\n")
endfunction()

function(run out_status out_text)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  # CMake wraps what it prints; the messages are compared as one line.
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  # A later edit must get a later time, even where the file system's clock is coarse.
  execute_process(COMMAND ${CMAKE_COMMAND} -E sleep 0.05)
  set(${out_status} ${status} PARENT_SCOPE)
  set(${out_text} "${text}" PARENT_SCOPE)
endfunction()

function(configure out_status out_text)
  # One build folder for all, so that the compiler is looked at only once.
  run(status text ${CMAKE_COMMAND} -G Ninja -S ${tree} -B ${build} -DCMAKE_CXX_COMPILER=${COMPILER}
    -DCMAKE_CXX_STANDARD=20)
  set(${out_status} ${status} PARENT_SCOPE)
  set(${out_text} "${text}" PARENT_SCOPE)
endfunction()

function(verdict name ok text)
  if(ok)
    message("ok    ${name}")
  else()
    message("WRONG ${name}\n      ${text}")
    math(EXPR failures "${failures} + 1")
    set(failures ${failures} PARENT_SCOPE)
  endif()
endfunction()

macro(expect_accepted name)
  configure(status text)
  set(ok FALSE)
  if(status EQUAL 0)
    set(ok TRUE)
  endif()
  verdict("accepted: ${name}" ${ok} "${text}")
  lawful_tree()
endmacro()

macro(expect_refused name expected)
  configure(status text)
  set(ok FALSE)
  string(FIND "${text}" "${expected}" at)
  if(NOT status EQUAL 0 AND at GREATER -1)
    set(ok TRUE)
  endif()
  verdict("refused: ${name}" ${ok} "expected: ${expected}\n      got: ${text}")
  lawful_tree()
endmacro()

lawful_tree()
expect_accepted("a lawful tree")

file(APPEND ${tree}/src/top/top.cc "#include <weft/side.h>\n")
expect_refused("a header of a module that is neither used nor shown"
  "src/top/top.cc:4: includes \"weft/side.h\", but top sees only: mid, low [law: visible]")

file(WRITE ${tree}/src/low/low.cc "\n  #  include \"weft/mid.h\"\n")
expect_refused("a header of a module declared below"
  "src/low/low.cc:2: includes \"weft/mid.h\", but low sees only: [law: visible]")

file(APPEND ${tree}/src/top/top_test.cc "#include \"weft/side.h\"\n")
expect_refused("a test that sees more than its module"
  "src/top/top_test.cc:2: includes \"weft/side.h\"")

file(APPEND ${tree}/src/top/top.h "#include \"weft/low.h\"\n")
expect_refused("a public header that shows what its module does not use"
  "src/top/top.h:3: the public header of top includes \"weft/low.h\", but top does not list low under USES [law: shown]")

file(WRITE ${tree}/src/side/CMakeLists.txt
  "\nweft_module(side USES low mid SOURCES side.cc TESTS side_test.cc)\n")
expect_refused("USES of a module declared below"
  "src/side/CMakeLists.txt:2: side uses mid, which is not declared above it in src/CMakeLists.txt [law: order]")

file(WRITE ${tree}/src/side/CMakeLists.txt
  "weft_module(side USES nothing SOURCES side.cc TESTS side_test.cc)\n")
expect_refused("USES of a module that does not exist"
  "src/side/CMakeLists.txt:1: side uses nothing, which is not declared above it")

file(WRITE ${tree}/src/side/CMakeLists.txt
  "weft_module(side USES side SOURCES side.cc TESTS side_test.cc)\n")
expect_refused("USES of itself" "side uses side, which is not declared above it")

file(APPEND ${tree}/src/top/top.cc "#include \"../mid/tcp/lane.h\"\n")
expect_refused("a path out of the folder"
  "src/top/top.cc:4: includes \"../mid/tcp/lane.h\": a path may not leave the module's folder [law: own folder]")

file(APPEND ${tree}/src/mid/tcp/lane.cc "#include \"tcp/../../low/low.h\"\n")
expect_refused("a path out of the folder by a detour"
  "src/mid/tcp/lane.cc:3: includes \"tcp/../../low/low.h\"")

file(APPEND ${tree}/src/top/top.cc "#include \"${tree}/src/low/low.h\"\n")
expect_refused("an absolute path" "a path may not leave the module's folder [law: own folder]")

file(APPEND ${tree}/src/mid/mid.h "#include \"tcp/lane.h\"\n")
expect_refused("a public header that needs a private one"
  "src/mid/mid.h:4: the public header of mid includes the private \"tcp/lane.h\"")

file(APPEND ${tree}/src/mid/wire/frame.cc "#include \"tcp/lane.h\"\n")
expect_refused("a source that includes a header of a later part"
  "src/mid/wire/frame.cc:3: includes \"tcp/lane.h\", but mid lists tcp after wire under PARTS [law: parts]")

file(APPEND ${tree}/src/mid/wire/frame.h "#include \"./tcp/lane.h\"\n")
expect_refused("a header that includes one of a later part, by a detour"
  "src/mid/wire/frame.h:3: includes \"./tcp/lane.h\", but mid lists tcp after wire under PARTS [law: parts]")

file(APPEND ${tree}/src/mid/tcp/lane.cc "#include \"signal.h\"\n")
expect_refused("a file in a part that includes a private header of the top folder"
  "src/mid/tcp/lane.cc:3: includes \"signal.h\" of the module's top folder, which stands above its sub-folders [law: parts]")

file(APPEND ${tree}/src/mid/wire/frame.cc "#define LATER \"tcp/lane.h\"\n#include LATER\n")
expect_refused("a file in a part that includes what a macro says"
  "src/mid/wire/frame.cc:4: includes what a macro says, which the law cannot read [law: parts]")

file(WRITE ${tree}/src/mid/wire/deep/deeper.h "#pragma once\n#include \"tcp/lane.h\"\n")
expect_refused("a file further down in a part"
  "src/mid/wire/deep/deeper.h:2: includes \"tcp/lane.h\", but mid lists tcp after wire under PARTS [law: parts]")

file(WRITE ${tree}/src/mid/shm/segment.h "#pragma once\n")
expect_refused("a header in a sub-folder that is no part"
  "src/mid/shm/segment.h:1: is in the sub-folder shm, which mid does not list under PARTS [law: parts]")

file(WRITE ${tree}/src/top/deep/more.cc "")
file(WRITE ${tree}/src/top/CMakeLists.txt
  "weft_module(top USES mid SOURCES top.cc deep/more.cc TESTS top_test.cc)\n")
expect_refused("a source in a sub-folder that is no part"
  "src/top/deep/more.cc:1: is in the sub-folder deep, which top does not list under PARTS [law: parts]")

file(WRITE ${tree}/src/top/CMakeLists.txt
  "weft_module(top\n  USES mid\n  PARTS gone\n  SOURCES top.cc\n  TESTS top_test.cc)\n")
expect_refused("a part without files"
  "src/top/CMakeLists.txt:3: top lists gone, but no header or source is in src/top/gone/ [law: parts]")

file(REMOVE ${tree}/src/side/side.h)
expect_refused("a module without a public header"
  "src/side/CMakeLists.txt:1: side has no public header: src/side/side.h does not exist [law: one public header]")

foreach(stray IN ITEMS src/top/more_test.cc src/top/more_fuzz.cc src/top/more_bench.cc
    src/mid/tcp/more.cc src/stray.cc src/nowhere/nowhere.cc tests/system/more_test.cc
    tests/more_fuzz.cc tests/more_bench.cc tests/more_test.py)
  file(WRITE ${tree}/${stray} "")
  expect_refused("a file that no list names, ${stray}" "${stray}:1: no list in any CMakeLists.txt names")
endforeach()

file(WRITE ${tree}/src/top/CMakeLists.txt "weft_module(top USES mid SOURCES top.cc gone.cc TESTS top_test.cc)\n")
expect_refused("a list that names no file" "top lists gone.cc, which does not exist [law: listed]")

file(APPEND ${tree}/src/top/top.cc "#include \"weft/side.h\"\n")
file(WRITE ${tree}/src/low/more.cc "")
configure(status text)
set(ok FALSE)
if(text MATCHES "src/top/top.cc:4" AND text MATCHES "src/low/more.cc:1")
  set(ok TRUE)
endif()
verdict("reported: all violations at once" ${ok} "${text}")

# After a lawful configure, the build itself must notice what an edit breaks: in an ordinary file
# by the scan, in a public header by configuring anew.
function(expect_build name should_pass expected)
  run(status text ${CMAKE_COMMAND} --build ${build} --target ${ARGN})
  set(passed FALSE)
  if(status EQUAL 0)
    set(passed TRUE)
  endif()
  string(FIND "${text}" "${expected}" at)
  set(ok FALSE)
  if(passed STREQUAL should_pass AND at GREATER -1)
    set(ok TRUE)
  endif()
  verdict("${name}" ${ok} "${text}")
  set(failures ${failures} PARENT_SCOPE)
endfunction()

lawful_tree()
configure(status text)
expect_build("built: a lawful tree" TRUE "" check_law)
file(APPEND ${tree}/src/top/top.cc "#include \"weft/side.h\"\n")
expect_build("refused while building: a source" FALSE
  "src/top/top.cc:4: includes \"weft/side.h\"" check_law)
lawful_tree()
file(APPEND ${tree}/src/mid/wire/frame.cc "#include \"tcp/lane.h\"\n")
expect_build("refused while building: a source in a part" FALSE
  "src/mid/wire/frame.cc:3: includes \"tcp/lane.h\", but mid lists tcp after wire" check_law)
lawful_tree()
expect_build("built: a lawful tree again" TRUE "" check_law)
file(WRITE ${tree}/src/mid/mid.h "#pragma once\n")
expect_build("refused while building: what a public header no longer shows" FALSE
  "src/top/top.cc:3: includes \"weft/low.h\", but top sees only: mid" check_law)

# Where the text is not read, the compiler has no path to the file either.
lawful_tree()
file(APPEND ${tree}/src/top/top.cc "#define HIDDEN \"weft/side.h\"\n#include HIDDEN\n")
configure(status text)
expect_build("refused by the compiler: a name behind a macro" FALSE
  "fatal error:" weft_top)
lawful_tree()
file(APPEND ${tree}/src/top/top.cc "#define HIDDEN \"tcp/lane.h\"\n#include HIDDEN\n")
expect_build("refused by the compiler: a private header of another module" FALSE
  "fatal error:" weft_top)

if(failures)
  message(FATAL_ERROR "${failures} wrong")
endif()
