#pragma once

// What nearly every test includes, compiled once. The fault tests and the tests of the header-only build do without it.
#include <torch/torch.h>

#include <fmt/format.h>

#include "lockstep/lockstep.hpp"
#include "support/catch.hpp"
