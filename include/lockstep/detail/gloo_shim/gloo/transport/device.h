#pragma once

// Declares the name of Gloo's device, which ProcessGroupGloo.hpp holds by pointer.
#define LOCKSTEP_DETAIL_GLOO_SHIM_DEVICE

namespace gloo::transport {
class Device;
}
