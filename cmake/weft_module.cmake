# weft_module: declares one module, checks it against the module law, and builds it.
#
#   weft_module(plan
#     USES base                        modules declared above this one
#     PARTS text tree                  its sub-folders with code, lowest first
#     SOURCES plan.cc parse.cc         without main.cc: becomes part of libweft.so
#     TESTS plan_test.cc               one GoogleTest program, plan_test
#     FUZZ parse_fuzz.cc               one program each; corpus in corpus/parse/
#     BENCH parse_bench.cc             one Google Benchmark program each
#     DATA models/small.json           installed as share/weft/plan/models/small.json
#     LIBS nlohmann_json::nlohmann_json)
#
# The folder of the call is the module's; `<name>.h` in it is the one public header, which others
# include as "weft/<name>.h". A module with a main.cc among its SOURCES is a program: it links
# libweft.so instead of being part of it.
#
# In the build tree the programs stand beside libweft.so and share/weft/, tests in bin/. So data
# is in share/weft/ or ../share/weft/, seen from any of them, built or installed.

include(${CMAKE_CURRENT_LIST_DIR}/weft_law.cmake)

set(_weft_here ${CMAKE_CURRENT_LIST_DIR})

# Adds -I for the public headers of `modules` to a target, and the module's own folder for quoted
# includes only, so that a private "signal.h" never hides the system's <signal.h>.
function(_weft_see target folder)
  foreach(module IN LISTS ARGN)
    target_include_directories(${target} PRIVATE ${PROJECT_BINARY_DIR}/include/${module})
  endforeach()
  target_compile_options(${target} PRIVATE "SHELL:-iquote \"${folder}\"")
endfunction()

function(_weft_test_environment name)
  set_property(TEST ${name} PROPERTY ENVIRONMENT
    WEFT=${PROJECT_BINARY_DIR}/weft
    WEFT_SOURCE_DIR=${PROJECT_SOURCE_DIR}
    WEFT_BUILD_DIR=${PROJECT_BINARY_DIR}
    PYTHONDONTWRITEBYTECODE=1
    GTEST_BRIEF=1)  # a failing test is found in what is printed
endfunction()

# A program that belongs to a module's tests: it sees what the module sees, and tests/support.
function(_weft_test_program target name)
  get_property(visible GLOBAL PROPERTY WEFT_VISIBLE_${name})
  get_property(folder GLOBAL PROPERTY WEFT_FOLDER_${name})
  get_property(libs GLOBAL PROPERTY WEFT_LIBS_${name})
  _weft_see(${target} ${folder} ${name} ${visible})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests/support)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  if(TARGET weft_${name}_objects)
    target_link_libraries(${target} PRIVATE weft_${name}_objects)
  endif()
  target_link_libraries(${target} PRIVATE weft ${libs} Threads::Threads)
endfunction()

function(_weft_fuzz name file)
  cmake_path(GET file STEM stem)
  string(REGEX REPLACE "_fuzz$" "" subject ${stem})
  get_property(folder GLOBAL PROPERTY WEFT_FOLDER_${name})
  set(corpus ${folder}/corpus/${subject})
  if(NOT EXISTS ${corpus})
    set(corpus)
  endif()
  if(WEFT_FUZZ)
    add_executable(${stem} ${file})
    target_link_options(${stem} PRIVATE -fsanitize=fuzzer)
    # What the fuzzer finds goes to the build tree; the corpus in the sources is only read.
    set(found ${PROJECT_BINARY_DIR}/corpus/${subject})
    file(MAKE_DIRECTORY ${found})
    add_test(NAME ${stem} COMMAND ${stem} -max_total_time=20 -timeout=10 ${found} ${corpus})
  else()
    # The same file with a plain driver, so that a fuzz target cannot rot between fuzzing runs.
    add_executable(${stem} ${file} ${_weft_here}/fuzz_driver.cc)
    add_test(NAME ${stem} COMMAND ${stem} --runs 2000 ${corpus})
  endif()
  _weft_test_program(${stem} ${name})
  _weft_test_environment(${stem})
  set_tests_properties(${stem} PROPERTIES LABELS fuzz TIMEOUT 300)
endfunction()

function(_weft_bench name file)
  cmake_path(GET file STEM stem)
  add_executable(${stem} ${file})
  _weft_test_program(${stem} ${name})
  target_link_libraries(${stem} PRIVATE benchmark::benchmark benchmark::benchmark_main)
  # A benchmark runs once, briefly, as a test: it must build and give its answer.
  add_test(NAME ${stem} COMMAND ${stem} --benchmark_min_time=0.001)
  _weft_test_environment(${stem})
  set_tests_properties(${stem} PROPERTIES LABELS bench TIMEOUT 300)
endfunction()

function(weft_module name)
  set(lists USES PARTS SOURCES TESTS FUZZ BENCH DATA LIBS)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "${lists}")
  set(root ${PROJECT_SOURCE_DIR})
  set(folder ${CMAKE_CURRENT_SOURCE_DIR})
  set(list_file ${folder}/CMakeLists.txt)
  set(call "weft_module(")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_module(${name}): what is '${arg_UNPARSED_ARGUMENTS}'?")
  endif()

  # What may be used: only what stands above. The order of declaration is the proof that there is
  # no cycle.
  get_property(declared GLOBAL PROPERTY WEFT_MODULES)
  set(visible)
  foreach(used IN LISTS arg_USES)
    if(NOT used IN_LIST declared)
      weft_law_violation(${root} ${list_file} "${call}" "order"
        "${name} uses ${used}, which is not declared above it in src/CMakeLists.txt")
    endif()
    get_property(shown GLOBAL PROPERTY WEFT_SHOWN_${used})
    list(APPEND visible ${used} ${shown})
  endforeach()
  list(REMOVE_DUPLICATES visible)

  set(header ${folder}/${name}.h)
  if(NOT EXISTS ${header})
    weft_law_violation(${root} ${list_file} "${call}" "one public header"
      "${name} has no public header: src/${name}/${name}.h does not exist")
    set_property(GLOBAL APPEND PROPERTY WEFT_MODULES ${name})
    return()
  endif()

  # What the public header includes, its users see as well.
  weft_law_includes(${header} paths)
  set(shown)
  foreach(path IN LISTS paths)
    if(path MATCHES "^weft/(.*)\\.h$" AND CMAKE_MATCH_1 IN_LIST arg_USES)
      set(other ${CMAKE_MATCH_1})
      get_property(further GLOBAL PROPERTY WEFT_SHOWN_${other})
      list(APPEND shown ${other} ${further})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES shown)
  # Include paths follow from public headers, so a change in one of these configures anew. All
  # other files are scanned again by the build itself, below.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})

  set_property(GLOBAL APPEND PROPERTY WEFT_MODULES ${name})
  set_property(GLOBAL PROPERTY WEFT_SHOWN_${name} ${shown})
  set_property(GLOBAL PROPERTY WEFT_VISIBLE_${name} ${visible})
  set_property(GLOBAL PROPERTY WEFT_FOLDER_${name} ${folder})
  set_property(GLOBAL PROPERTY WEFT_LIBS_${name} ${arg_LIBS})

  weft_law_scan(${root} ${name} ${folder} "${arg_USES}" "${visible}" "${arg_PARTS}")
  set(missing)
  foreach(file IN LISTS arg_SOURCES arg_TESTS arg_FUZZ arg_BENCH arg_DATA)
    if(NOT EXISTS ${folder}/${file})
      weft_law_violation(${root} ${list_file} "${file}" "listed"
        "${name} lists ${file}, which does not exist")
      set(missing TRUE)
    endif()
    set_property(GLOBAL APPEND PROPERTY WEFT_LISTED ${folder}/${file})
  endforeach()
  foreach(kind IN ITEMS FUZZ BENCH)
    string(TOLOWER ${kind} suffix)
    foreach(file IN LISTS arg_${kind})
      if(NOT file MATCHES "_${suffix}\\.cc$")
        weft_law_violation(${root} ${list_file} "${file}" "listed"
          "${name} lists ${file} under ${kind}, but its name does not end in _${suffix}.cc")
      endif()
    endforeach()
  endforeach()
  if(missing)
    return()
  endif()

  set(public ${PROJECT_BINARY_DIR}/include/${name}/weft)
  file(MAKE_DIRECTORY ${public})
  file(CREATE_LINK ${header} ${public}/${name}.h SYMBOLIC)

  # The text is checked again before anything that changed is compiled.
  file(GLOB_RECURSE scanned CONFIGURE_DEPENDS ${folder}/*.h ${folder}/*.cc)
  set(stamp ${CMAKE_CURRENT_BINARY_DIR}/law.stamp)
  add_custom_command(OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -DROOT=${root} -DMODULE=${name} -DFOLDER=${folder} "-DUSES=${arg_USES}"
            "-DVISIBLE=${visible}" "-DPARTS=${arg_PARTS}" -DSTAMP=${stamp}
            -P ${_weft_here}/weft_law.cmake
    DEPENDS ${scanned} ${_weft_here}/weft_law.cmake
    COMMENT "Checking the module law in ${name}" VERBATIM)
  add_custom_target(${name}_law ALL DEPENDS ${stamp})
  set_property(GLOBAL APPEND PROPERTY WEFT_LAW_TARGETS ${name}_law)

  set(data)
  foreach(file IN LISTS arg_DATA)
    set(copy ${PROJECT_BINARY_DIR}/share/weft/${name}/${file})
    add_custom_command(OUTPUT ${copy} DEPENDS ${folder}/${file}
      COMMAND ${CMAKE_COMMAND} -E copy ${folder}/${file} ${copy} VERBATIM)
    list(APPEND data ${copy})
    cmake_path(GET file PARENT_PATH parent)
    install(FILES ${file} DESTINATION ${CMAKE_INSTALL_DATADIR}/weft/${name}/${parent})
  endforeach()
  if(data)
    add_custom_target(${name}_data ALL DEPENDS ${data})
    set_property(GLOBAL APPEND PROPERTY WEFT_DATA_TARGETS ${name}_data)
  endif()

  # Does the public header compile alone? Built by tools/check.
  set(alone ${CMAKE_CURRENT_BINARY_DIR}/${name}_header.cc)
  file(CONFIGURE OUTPUT ${alone} CONTENT "#include \"weft/${name}.h\"  // alone\n#include \"weft/${name}.h\"  // twice\n")
  add_library(${name}_header OBJECT EXCLUDE_FROM_ALL ${alone})
  foreach(module IN ITEMS ${name} ${shown})
    target_include_directories(${name}_header PRIVATE ${PROJECT_BINARY_DIR}/include/${module})
  endforeach()
  target_link_libraries(${name}_header PRIVATE ${arg_LIBS})
  set_property(GLOBAL APPEND PROPERTY WEFT_HEADER_TARGETS ${name}_header)

  set(objects weft_${name})
  set(program FALSE)
  if("main.cc" IN_LIST arg_SOURCES)
    set(program TRUE)
    set(objects weft_${name}_objects)
    list(REMOVE_ITEM arg_SOURCES main.cc)
    add_executable(weft_${name} main.cc)
    add_dependencies(weft_${name} ${name}_law)
    _weft_see(weft_${name} ${folder} ${name} ${visible})
    set_target_properties(weft_${name} PROPERTIES
      OUTPUT_NAME weft
      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
      INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
    target_link_libraries(weft_${name} PRIVATE weft ${arg_LIBS} Threads::Threads)
    install(TARGETS weft_${name} RUNTIME)
  endif()
  if(arg_SOURCES)
    add_library(${objects} OBJECT ${arg_SOURCES})
    add_dependencies(${objects} ${name}_law)
    _weft_see(${objects} ${folder} ${name} ${visible})
    target_link_libraries(${objects} PRIVATE ${arg_LIBS} Threads::Threads)
    if(program)
      target_link_libraries(weft_${name} PRIVATE ${objects})
    else()
      set_property(GLOBAL APPEND PROPERTY WEFT_PARTS ${name})
    endif()
  endif()
  if(NOT program)
    install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/weft)
  endif()

  if(NOT WEFT_TESTS)
    return()
  endif()
  if(arg_TESTS)
    add_executable(${name}_test ${arg_TESTS})
    _weft_test_program(${name}_test ${name})
    target_link_libraries(${name}_test PRIVATE GTest::gmock GTest::gtest_main)
    add_test(NAME ${name}_test COMMAND ${name}_test)
    _weft_test_environment(${name}_test)
    # The limit ends what hangs; it says nothing of speed. On a machine that others use the longest
    # takes 300 s, twice what it takes alone, and sanitizers slow it down by five and more.
    set(limit 900)
    if(WEFT_SANITIZE)
      set(limit 2700)
    endif()
    set_tests_properties(${name}_test PROPERTIES LABELS unit TIMEOUT ${limit})
  endif()
  foreach(file IN LISTS arg_FUZZ)
    _weft_fuzz(${name} ${file})
  endforeach()
  foreach(file IN LISTS arg_BENCH)
    _weft_bench(${name} ${file})
  endforeach()
endfunction()

# Joins the modules declared so far into libweft.so. Called once, at the end of src/CMakeLists.txt.
# One shared library, because a process must have one recorder, whoever loads it.
function(weft_library)
  get_property(parts GLOBAL PROPERTY WEFT_PARTS)
  if(NOT parts)
    return()
  endif()
  set(objects)
  set(libs)
  foreach(name IN LISTS parts)
    list(APPEND objects $<TARGET_OBJECTS:weft_${name}>)
    get_property(more GLOBAL PROPERTY WEFT_LIBS_${name})
    list(APPEND libs ${more})
  endforeach()
  list(REMOVE_DUPLICATES libs)
  add_library(weft SHARED ${objects})
  add_library(weft::weft ALIAS weft)
  target_link_libraries(weft PRIVATE ${libs} Threads::Threads)
  target_compile_features(weft PUBLIC cxx_std_20)
  target_include_directories(weft INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  # Before 1.0 a minor release may change the binary interface.
  set_target_properties(weft PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    LINKER_LANGUAGE CXX
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  get_property(data GLOBAL PROPERTY WEFT_DATA_TARGETS)
  if(data)
    add_dependencies(weft ${data})
  endif()
  get_property(headers GLOBAL PROPERTY WEFT_HEADER_TARGETS)
  add_custom_target(check_headers DEPENDS ${headers})
  get_property(laws GLOBAL PROPERTY WEFT_LAW_TARGETS)
  add_custom_target(check_law DEPENDS ${laws})

  set(config ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
  include(CMakePackageConfigHelpers)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/weftConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  install(TARGETS weft EXPORT weft LIBRARY)
  install(EXPORT weft NAMESPACE weft:: FILE weftConfig.cmake DESTINATION ${config})
  install(FILES ${PROJECT_BINARY_DIR}/weftConfigVersion.cmake DESTINATION ${config})
endfunction()

# A test that drives the program from the outside:
#
#   weft_system_test(trace_roundtrip roundtrip_test.py ARGS --ranks 4 TIMEOUT 120 LABEL slow)
#
# The script finds the program in $WEFT and the sources in $WEFT_SOURCE_DIR; exit status 77 means
# skipped. Label `system` (the default) runs in `make test`, `slow` only in `make test-all`.
function(weft_system_test name script)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT;LABEL" "ARGS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_system_test(${name}): what is '${arg_UNPARSED_ARGUMENTS}'?")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(NOT arg_LABEL)
    set(arg_LABEL system)
  endif()
  if(NOT arg_LABEL MATCHES "^(system|slow)$")
    message(FATAL_ERROR "weft_system_test(${name}): the label is system or slow, not ${arg_LABEL}")
  endif()
  set_property(GLOBAL APPEND PROPERTY WEFT_LISTED ${CMAKE_CURRENT_SOURCE_DIR}/${script})
  if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${script})
    weft_law_violation(${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/CMakeLists.txt "${script}"
      "listed" "test ${name} names ${script}, which does not exist")
  endif()
  add_test(NAME ${name}
    COMMAND ${PROJECT_SOURCE_DIR}/tools/python ${CMAKE_CURRENT_SOURCE_DIR}/${script} ${arg_ARGS})
  _weft_test_environment(${name})
  # Alone: these measure time, and a neighbour would be measured with them.
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} TIMEOUT ${arg_TIMEOUT}
    SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
endfunction()

# Refuses files that no list names, then reports every violation. Called once, last of all.
function(weft_law_finish)
  set(root ${PROJECT_SOURCE_DIR})
  get_property(listed GLOBAL PROPERTY WEFT_LISTED)
  get_property(absent GLOBAL PROPERTY WEFT_ABSENT)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS ${root}/src/*.cc ${root}/src/*.cpp)
  if(WEFT_TESTS AND NOT WEFT_ONLY)
    file(GLOB_RECURSE more CONFIGURE_DEPENDS ${root}/tests/*_test.cc ${root}/tests/*_fuzz.cc
      ${root}/tests/*_bench.cc ${root}/tests/*_test.py)
    list(APPEND files ${more})
  endif()
  if(listed)
    list(REMOVE_ITEM files ${listed})
  endif()
  foreach(file IN LISTS files)
    file(RELATIVE_PATH name ${root} ${file})
    string(REGEX REPLACE "^src/([^/]*)/.*" "\\1" module ${name})
    if(NOT module IN_LIST absent)
      weft_law_violation(${root} ${file} "" "listed"
        "no list in any CMakeLists.txt names this file, so nothing would build or run it")
    endif()
  endforeach()
  weft_law_report()
endfunction()
