#pragma once

// Stands in for Gloo's header of this name: ProcessGroupGloo.hpp includes it and uses nothing of it.
#define LOCKSTEP_DETAIL_GLOO_SHIM_ERROR
