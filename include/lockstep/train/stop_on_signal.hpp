#pragma once

#include <signal.h>

#include "lockstep/train/extras.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/process.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

/// The last signal that a StopOnSignal of this process has received, 0 if there was none.
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "the signal handler writes it");

extern "C" inline void lockstep_note_stop_signal(int number) {
  stop_signal = number;
}
}  // namespace detail

/// Options of StopOnSignal.
struct StopOptions {
  /// The signals that ask for the stop. SIGTERM is what Kubernetes and `scancel` send, SIGUSR1 what Slurm
  /// sends for `--signal=USR1@120`.
  std::vector<int> signals = {SIGTERM, SIGUSR1};
  /// The number of optimizer steps between two agreements of the ranks, at least 1.
  std::int64_t every = 1;
};

/// A StepCallback that stops a run when a signal has reached any rank: after the same step, every rank calls `save()`
/// and throws Stopped, which `fit` passes on. `launch` turns Stopped into exit code 75 and one line on stderr:
///
/// ```cpp
/// trainer.load_checkpoint_if_exists("run.ckpt");
/// lockstep::StopOnSignal stop{trainer.comm(), [&] { trainer.save_checkpoint("run.ckpt"); }};
/// trainer.fit(data, loss, stop);
/// ```
///
/// Pass it as the last callback: callbacks after it do not see the last step. While it lives, and after a stop until
/// the process ends, its signals have no other effect. At most one lives at a time. It refers to the communicator.
template <Communicator C, class Save>
class StopOnSignal {
 public:
  /// Throws UsageError for a signal that cannot be caught or that `launch`, where it has started the ranks, does
  /// not pass on to them, and if `options.every` is below 1.
  StopOnSignal(C& comm, Save save, StopOptions options = {})
      : comm_(comm), save_(std::move(save)), options_(std::move(options)) {
    if (options_.every < 1)
      throw UsageError(detail::formatted("StopOptions::every is {}: it must be a number of steps, 1 or more",
                                         options_.every));
    detail::stop_signal = 0;
    struct sigaction action {};
    action.sa_handler = detail::lockstep_note_stop_signal;
    action.sa_flags = SA_RESTART;
    for (const int number : options_.signals) {
      struct sigaction before {};
      std::string fault;
      if (sigaction(number, &action, &before) != 0)
        fault = detail::formatted("signal {} cannot be caught", number);
      else
        before_.emplace_back(number, before);
      if (fault.empty() && detail::report_descriptor() >= 0 && !detail::is_passed_on(number))
        fault = detail::formatted(
            "`launch` does not pass signal {} on to the ranks: use SIGTERM, SIGINT, SIGHUP, SIGQUIT, "
            "SIGUSR1, SIGUSR2, "
            "SIGALRM or SIGXCPU, or a launcher that passes it on",
            number);
      if (fault.empty()) continue;
      restore();
      throw UsageError("StopOptions::signals: " + fault);
    }
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;
  ~StopOnSignal() {
    // The signal may reach this rank after it has reached another one: it must not kill the rank then.
    if (!stopped_) restore();
  }

  /// Throws Stopped on every rank if a signal has reached one of them.
  void on_step(const StepReport& report) {
    if ((report.step + 1) % options_.every != 0) return;
    const detail::CallScope scope("StopOnSignal::on_step");
    const int own = detail::stop_signal;
    if (!any_rank(comm_, own != 0)) return;
    const char* name = own == 0 ? "" : sigabbrev_np(own);
    const std::vector<std::string> signals =
        comm_.all_gather_bytes(own == 0 ? std::string()
                               : name   ? detail::formatted("SIG{}", name)
                                        : detail::formatted("signal {}", own));
    std::size_t first = 0;
    while (first + 1 < signals.size() && signals[first].empty()) ++first;
    {
      const detail::CallScope saving{detail::ServedCall{}};
      save_();
    }
    stopped_ = true;
    throw detail::CollectiveError<Stopped>(
        detail::formatted(
            "stopped after step {}, as {} on rank {} asked for; start the program again to resume",
            report.step + 1, signals[first], detail::RankNames(comm_)(first)),
        comm_.size());
  }

 private:
  void restore() {
    for (const auto& [number, before] : before_) sigaction(number, &before, nullptr);
    before_.clear();
  }

  C& comm_;
  Save save_;
  StopOptions options_;
  std::vector<std::pair<int, struct sigaction>> before_;
  bool stopped_ = false;
};

}  // namespace lockstep::inline v0_1
