#pragma once

#include <chrono>

// Declares the names of Gloo that ProcessGroupGloo.hpp mentions. Their layout here is not Gloo's: nothing may
// create one, look inside one or derive from one.
#define LOCKSTEP_DETAIL_GLOO_SHIM_CONTEXT

namespace gloo {

class Context {
 public:
  Context() = delete;
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class UnboundBuffer;
}

}  // namespace gloo
