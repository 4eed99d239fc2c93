#pragma once

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// A StepGraph that plays one on the CPU: it keeps the step it is given and makes it again in each replay.
/// The capture itself does what the first replay would, which then does nothing, so that the arithmetic is
/// that of a graph. What reads a value on the host while it captures is noted, which a real one would refuse.
class PlayedGraph {
 public:
  struct Log {
    std::vector<std::string> calls;
    std::vector<std::string> reads;  // operators that read a value, while capturing
  };

  explicit PlayedGraph(std::shared_ptr<Log> log) : log_(std::move(log)) {}

  template <class Function>
  void on_stream(Function&& function) {
    log_->calls.emplace_back("stream");
    function();
  }
  template <class Function>
  void capture(Function&& function) {
    log_->calls.emplace_back("capture");
    step_ = function;
    const Watch watch(*log_);
    step_();
    captured_now_ = true;
  }
  void replay() {
    log_->calls.emplace_back("replay");
    if (!std::exchange(captured_now_, false)) step_();
  }
  [[nodiscard]] c10::Device device() const { return at::kCPU; }

 private:
  // Notes the operators that give a value to the host. The fused steps of a CPU read their rate themselves,
  // which those of a GPU leave where it is.
  struct Watch {
    explicit Watch(Log& log) {
      current() = &log;
      handle =
          at::addGlobalCallback(at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
      at::removeCallback(handle);
      current() = nullptr;
    }

    static bool fused(const at::RecordFunction& function) {
      return std::string_view(function.name()).starts_with("aten::_fused_");
    }
    static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
      static constexpr std::array reading{"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero",
                                          "aten::equal"};
      if (fused(function)) ++inside_fused();
      for (const std::string_view name : reading)
        if (current() && inside_fused() == 0 && function.name() == name) current()->reads.emplace_back(name);
      return nullptr;
    }
    static void end(const at::RecordFunction& function, at::ObserverContext*) {
      if (fused(function)) --inside_fused();
    }
    static Log*& current() {
      static Log* log = nullptr;
      return log;
    }
    static int& inside_fused() {
      static int depth = 0;
      return depth;
    }
    at::CallbackHandle handle;
  };

  std::shared_ptr<Log> log_;
  std::function<void()> step_;
  bool captured_now_ = false;
};
