#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>

namespace lockstep::detail {

/// Queues a callback for the end of the backward that the engine is running: calls `end(true)`, or
/// `end(false)` if the backward throws and the engine drops the callback.
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
