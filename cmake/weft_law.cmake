# The module law, as far as it can be read from the text of the sources.
#
# A module sees the public header of each module it USES, what those headers show in turn, its own
# files, and nothing else. This file only reads and reports; weft_module.cmake turns what is
# visible into include paths. It runs while CMake configures and, as a script, whenever a source
# of a module changed:
#
#   cmake -DMODULE=plan -DFOLDER=src/plan -DROOT=. -DUSES=base -DVISIBLE=base -P weft_law.cmake
#
# Comments and strings are not parsed: an #include at the start of a line counts, wherever it is.

cmake_minimum_required(VERSION 3.25)

# Sets `out` to the line of `file` on which `text` first occurs.
function(_weft_line file text out)
  file(READ ${file} content)
  string(FIND "${content}" "${text}" at)
  if(at LESS 0)
    set(at 0)
  endif()
  string(SUBSTRING "${content}" 0 ${at} before)
  string(REGEX REPLACE "[^\n]+" "" before "${before}")
  string(LENGTH "${before}" lines)
  math(EXPR lines "${lines} + 1")
  set(${out} ${lines} PARENT_SCOPE)
endfunction()

# Records one violation. They are reported together, so that one configure shows them all.
function(weft_law_violation root file text rule what)
  set(line 1)
  if(EXISTS ${file})
    _weft_line(${file} "${text}" line)
  endif()
  file(RELATIVE_PATH name ${root} ${file})
  set_property(GLOBAL APPEND_STRING PROPERTY WEFT_VIOLATIONS
    "  ${name}:${line}: ${what} [law: ${rule}]\n")
endfunction()

# Stops with everything that weft_law_violation recorded.
function(weft_law_report)
  get_property(violations GLOBAL PROPERTY WEFT_VIOLATIONS)
  if(violations)
    message(FATAL_ERROR "the module law (CONTRIBUTING.md) is broken:\n${violations}"
      "To leave unfinished modules out, name the others: -DWEFT_ONLY=\"base;trace\"")
  endif()
endfunction()

# Sets `out` to the paths that `file` includes, as written between the quotes or brackets.
function(weft_law_includes file out)
  file(READ ${file} content)
  string(REGEX MATCHALL "\n[ \t]*#[ \t]*include[ \t]*[\"<][^]\">;[\n]*[\">]" matches "\n${content}")
  set(paths)
  foreach(match IN LISTS matches)
    string(REGEX REPLACE ".*[\"<](.*)[\">]" "\\1" path "${match}")
    list(APPEND paths "${path}")
  endforeach()
  set(${out} "${paths}" PARENT_SCOPE)
endfunction()

# Checks every source and header in the folder of `module`.
function(weft_law_scan root module folder uses visible)
  file(GLOB_RECURSE files ${folder}/*.h ${folder}/*.cc)
  foreach(file IN LISTS files)
    weft_law_includes(${file} paths)
    foreach(path IN LISTS paths)
      if(path MATCHES "^/" OR path MATCHES "(^|/)\\.\\.(/|$)")
        weft_law_violation(${root} ${file} "${path}" "own folder"
          "includes \"${path}\": a path may not leave the module's folder")
      elseif(path MATCHES "^weft/(.*)\\.h$")
        set(other ${CMAKE_MATCH_1})
        if(file STREQUAL "${folder}/${module}.h")
          if(NOT other IN_LIST uses)
            weft_law_violation(${root} ${file} "${path}" "shown"
              "the public header of ${module} includes \"${path}\", but ${module} does not list ${other} under USES")
          endif()
        elseif(NOT other STREQUAL module AND NOT other IN_LIST visible)
          string(REPLACE ";" ", " seen "${visible}")
          weft_law_violation(${root} ${file} "${path}" "visible"
            "includes \"${path}\", but ${module} sees only: ${seen}")
        endif()
      elseif(file STREQUAL "${folder}/${module}.h" AND EXISTS ${folder}/${path})
        weft_law_violation(${root} ${file} "${path}" "one public header"
          "the public header of ${module} includes the private \"${path}\", which no other module can find")
      endif()
    endforeach()
  endforeach()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  weft_law_scan(${ROOT} ${MODULE} ${FOLDER} "${USES}" "${VISIBLE}")
  weft_law_report()
  file(TOUCH ${STAMP})
endif()
