# The module law, as far as it can be read from the text of the sources.
#
# A module sees the public header of each module it USES, what those headers show in turn, its own
# files, and nothing else. A module's sub-folders are its parts, in order: a file in one sees the
# private headers of its own part and of those before it. This file only reads and reports;
# weft_module.cmake turns what is visible into include paths. It runs while CMake configures and,
# as a script, whenever a source of a module changed:
#
#   cmake -DMODULE=lane -DFOLDER=src/lane -DROOT=. -DUSES=net -DVISIBLE="net;base"
#         -DPARTS="shm;tcp" -P weft_law.cmake
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

# Sets `out` to the paths that `file` includes, as written between the quotes or brackets, and
# `quoted`, if it is given, to those between quotes: only these can name a private header.
function(weft_law_includes file out)
  file(READ ${file} content)
  string(REGEX MATCHALL "\n[ \t]*#[ \t]*include[ \t]*[\"<][^]\">;[\n]*[\">]" matches "\n${content}")
  set(paths)
  set(in_quotes)
  foreach(match IN LISTS matches)
    string(REGEX REPLACE ".*[\"<](.*)[\">]" "\\1" path "${match}")
    list(APPEND paths "${path}")
    if(match MATCHES "\"")
      list(APPEND in_quotes "${path}")
    endif()
  endforeach()
  set(${out} "${paths}" PARENT_SCOPE)
  if(ARGC GREATER 2)
    set(${ARGV2} "${in_quotes}" PARENT_SCOPE)
  endif()
endfunction()

# Sets `out` to the sub-folder of `folder` in which `file` is, however deep; empty for its top.
function(_weft_part folder file out)
  file(RELATIVE_PATH name ${folder} ${file})
  set(part)
  if(name MATCHES "^([^/]*)/")
    set(part ${CMAKE_MATCH_1})
  endif()
  set(${out} "${part}" PARENT_SCOPE)
endfunction()

# Sets `out` to the file of the module that `path` names in an include between quotes in `file`,
# found as the compiler does: beside the file, then from the module's folder. Empty: none.
function(_weft_included folder file path out)
  cmake_path(GET file PARENT_PATH beside)
  set(found)
  foreach(start IN ITEMS ${beside} ${folder})
    cmake_path(APPEND start "${path}" OUTPUT_VARIABLE candidate)
    cmake_path(NORMAL_PATH candidate)
    if(NOT found AND EXISTS ${candidate})
      set(found ${candidate})
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Checks what one file in a sub-folder includes of its own module; `quoted` is what it includes
# between quotes.
function(_weft_law_part root module folder parts file quoted)
  _weft_part(${folder} ${file} part)
  if(NOT part IN_LIST parts)
    weft_law_violation(${root} ${file} "" "parts"
      "is in the sub-folder ${part}, which ${module} does not list under PARTS")
    return()
  endif()
  # Other modules' headers a macro cannot reach, for want of a path; this module's it could.
  file(READ ${file} content)
  if("\n${content}" MATCHES "\n([ \t]*#[ \t]*include[ \t]+[A-Za-z_][A-Za-z_0-9]*)")
    weft_law_violation(${root} ${file} "${CMAKE_MATCH_1}" "parts"
      "includes what a macro says, which the law cannot read")
  endif()
  list(FIND parts ${part} own)
  foreach(path IN LISTS quoted)
    _weft_included(${folder} ${file} "${path}" included)
    if(NOT included OR included STREQUAL "${folder}/${module}.h")
      continue()
    endif()
    _weft_part(${folder} ${included} other)
    if(NOT other)
      weft_law_violation(${root} ${file} "\"${path}\"" "parts"
        "includes \"${path}\" of the module's top folder, which stands above its sub-folders")
      continue()
    endif()
    # A part that is not listed is reported where its files are.
    list(FIND parts ${other} theirs)
    if(theirs GREATER own)
      weft_law_violation(${root} ${file} "\"${path}\"" "parts"
        "includes \"${path}\", but ${module} lists ${other} after ${part} under PARTS")
    endif()
  endforeach()
endfunction()

# Checks every source and header in the folder of `module`.
function(weft_law_scan root module folder uses visible parts)
  file(GLOB_RECURSE files ${folder}/*.h ${folder}/*.cc)
  set(empty ${parts})
  foreach(file IN LISTS files)
    weft_law_includes(${file} paths quoted)
    _weft_part(${folder} ${file} part)
    if(part)
      list(REMOVE_ITEM empty ${part})
      _weft_law_part(${root} ${module} ${folder} "${parts}" ${file} "${quoted}")
    endif()
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
      elseif(file STREQUAL "${folder}/${module}.h" AND path IN_LIST quoted AND EXISTS ${folder}/${path})
        weft_law_violation(${root} ${file} "${path}" "one public header"
          "the public header of ${module} includes the private \"${path}\", which no other module can find")
      endif()
    endforeach()
  endforeach()
  foreach(part IN LISTS empty)
    weft_law_violation(${root} ${folder}/CMakeLists.txt "PARTS" "parts"
      "${module} lists ${part}, but no header or source is in src/${module}/${part}/")
  endforeach()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  weft_law_scan(${ROOT} ${MODULE} ${FOLDER} "${USES}" "${VISIBLE}" "${PARTS}")
  weft_law_report()
  file(TOUCH ${STAMP})
endif()
