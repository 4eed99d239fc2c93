#pragma once

// What nearly every test includes, compiled once.
#include <torch/torch.h>

#include "support/catch.hpp"
