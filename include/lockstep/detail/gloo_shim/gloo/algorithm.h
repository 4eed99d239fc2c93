#pragma once

// Stands in for Gloo's header of this name, which no LibTorch distribution ships: ProcessGroupGloo.hpp
// includes it and uses nothing of it.
#define LOCKSTEP_DETAIL_GLOO_SHIM_ALGORITHM
