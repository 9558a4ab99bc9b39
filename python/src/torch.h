// What every file of the extension reads of torch: compiled once.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/api.h"
