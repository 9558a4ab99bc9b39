# Every outside library, found once. A module names the ones it needs under LIBS.

find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET GLOBAL libxxhash)
add_library(xxhash::xxhash ALIAS PkgConfig::xxhash)

if(WEFT_TESTS)
  find_package(GTest REQUIRED)
  find_package(benchmark REQUIRED)
endif()
