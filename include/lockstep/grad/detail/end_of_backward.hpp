#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>

namespace lockstep::detail {

/// Calls `end(true)` at the end of the backward that the engine runs now; where that throws, the engine drops
/// the call, and `end(false)` comes instead.
template <class End>
void at_end_of_backward(End end) {
  struct Token {
    explicit Token(End end) : end(std::move(end)) {}
    ~Token() {
      if (!ended) end(false);
    }
    End end;
    bool ended = false;
  };
  torch::autograd::Engine::get_default_engine().queue_callback(
      [token = std::make_shared<Token>(std::move(end))] {
        token->ended = true;
        token->end(true);
      });
}

}  // namespace lockstep::detail
