#pragma once

// What nearly every test includes, compiled once: LibTorch, what lockstep takes from it beyond that, and fmt.
#include <fmt/format.h>
#include <torch/torch.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/detail/process_group_gloo.hpp"
#include "support/catch.hpp"
