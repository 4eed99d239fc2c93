#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/process_wide.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/new_file.hpp"
#include "lockstep/world/report.hpp"

namespace lockstep::detail {

/// What the end of a failing process needs from the parts that know the other ranks.
struct FailureHooks {
  /// Tells all ranks; returns whether this failure is the first. May block: it gets a time limit.
  std::function<bool(const std::string& text)> publish;
  std::function<std::optional<std::string>()> published;
};
LOCKSTEP_PROCESS_WIDE inline FailureHooks failure_hooks;

/// The descriptor through which a supervising parent hears of a failure, -1 where there is none.
LOCKSTEP_PROCESS_WIDE inline int report_descriptor() {
  static const int fd = [] {
    const auto text = process_variable("LOCKSTEP_REPORT_FD");
    const int number = text ? whole_number(*text).value_or(-1) : -1;
    if (number > 2 && fcntl(number, F_GETFD) >= 0) {
      fcntl(number, F_SETFD, FD_CLOEXEC);
      unsetenv("LOCKSTEP_REPORT_FD");
      return number;
    }
    return -1;
  }();
  return fd;
}

/// Runs `work` in a thread and waits at most `limit` for it; what a stuck peer or pipe holds up is left
/// behind.
template <class Work>
void at_most(std::chrono::milliseconds limit, Work work) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable done_changed;
    bool done = false;
  };
  auto shared = std::make_shared<Shared>();
  try {
    std::thread([shared, work = std::move(work)]() mutable {
      try {
        work();
      } catch (...) {  // the failure that is being told matters, not this one
      }
      std::lock_guard lock(shared->mutex);
      shared->done = true;
      shared->done_changed.notify_all();
    }).detach();
  } catch (const std::system_error&) {
    return;
  }
  std::unique_lock lock(shared->mutex);
  shared->done_changed.wait_for(lock, limit, [&] { return shared->done; });
}

inline std::string json_string(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      quoted += fmt::format("\\{}", c);
    else if (static_cast<unsigned char>(c) < 0x20)
      quoted += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      quoted += c;
  }
  return quoted + '"';
}

/// Writes torchrun's error file: whole or not at all, since a torn one makes torchrun itself crash.
inline void write_elastic_error_file(const std::string& path, const std::string& text, std::time_t when) {
  const auto temporary = fmt::format("{}.{}", path, getpid());
  const int descriptor = open_new_file(temporary.c_str());
  std::FILE* file = descriptor < 0 ? nullptr : fdopen(descriptor, "w");
  if (file == nullptr) return;
  const auto json =
      fmt::format(R"({{"message":{{"message":{},"extraInfo":{{"py_callstack":{},"timestamp":"{}"}}}}}})",
                  json_string(text), json_string(text), static_cast<long long>(when));
  const bool whole = std::fwrite(json.data(), 1, json.size(), file) == json.size();
  if (std::fclose(file) == 0 && whole) std::rename(temporary.c_str(), path.c_str());
}

/// `code` as an exit code that is 0 only where `code` is: the kernel keeps its last eight bits.
inline int exit_status(int code) {
  return code != 0 && (code & 0xff) == 0 ? 1 : code;
}

/// Ends this process now, and the others with it: tells the supervisor and the store, flushes, leaves without
/// running a destructor. `report` is said once, whichever thread comes first.
LOCKSTEP_PROCESS_WIDE [[noreturn]] inline void fail_process(FailureReport report) {
  static std::atomic_flag begun;
  if (begun.test_and_set())
    while (true) pause();
  const int rank = process_rank.load();
  const std::time_t when = std::time(nullptr);
  bool first = true;
  if (report_descriptor() >= 0) {
    at_most(std::chrono::milliseconds(500), [] {
      std::cout.flush();
      std::fflush(nullptr);
    });
    const auto bytes = encode(report).substr(0, 60000);
    if (write(report_descriptor(), bytes.data(), bytes.size()) < 0) {
    }
  }
  const bool consequence = report.kind == FailureKind::peer;
  if (!consequence && failure_hooks.publish) {
    const auto told = std::make_shared<std::atomic<bool>>(true);
    const auto text =
        report.kind == FailureKind::usage ? report.text : fmt::format("rank {}: {}", rank, report.text);
    at_most(std::chrono::milliseconds(1500), [told, text] { *told = failure_hooks.publish(text); });
    first = *told;
  }
  if (report_descriptor() < 0) {
    const bool said_already = !first && report.kind == FailureKind::usage;
    const auto text = report.kind == FailureKind::usage || rank < 0
                          ? fmt::format("error: {}\n", report.text)
                          : fmt::format("error: rank {} failed: {}\n", rank, report.text);
    at_most(std::chrono::milliseconds(500), [text, said_already] {
      std::cout.flush();
      std::fflush(stdout);
      if (!said_already) std::fwrite(text.data(), 1, text.size(), stderr);
      std::fflush(nullptr);
    });
    // What libraries say from here on is about connections that end: nothing that a user could act on.
    const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (nowhere >= 0) dup2(nowhere, 2);
    // The launcher takes the earliest second for the cause: a consequence must be later.
    if (consequence && rank >= 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    if (const auto path = process_variable("TORCHELASTIC_ERROR_FILE"))
      write_elastic_error_file(*path, report.text, consequence ? std::time(nullptr) : when);
  }
  _exit(report.code);
}

/// Makes an exception that nobody catches end the process through `fail_process`, with the stack as it is: no
/// destructor on the way up can wait for a peer that no longer answers.
LOCKSTEP_PROCESS_WIDE inline void end_on_uncaught() {
  static std::terminate_handler previous = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    report_descriptor();
    previous = std::get_terminate();
    if (previous != __gnu_cxx::__verbose_terminate_handler) return;  // the program has its own
    std::set_terminate([] { fail_process(describe(std::current_exception())); });
  });
}

/// Runs `work` on a thread with no handler above it, so that what it throws reaches `end_on_uncaught` before
/// any destructor runs. Returns when it returns.
inline void run_without_handlers(std::function<void()> work) {
  end_on_uncaught();
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  rlimit stack{};
  const std::size_t least = 8u << 20;
  if (getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY)
    pthread_attr_setstacksize(&attributes, std::max<std::size_t>(least, stack.rlim_cur));
  else
    pthread_attr_setstacksize(&attributes, 8 * least);
  pthread_t thread;
  const auto run = [](void* argument) -> void* {
    (*static_cast<std::function<void()>*>(argument))();
    return nullptr;
  };
  const int status = pthread_create(&thread, &attributes, run, &work);
  pthread_attr_destroy(&attributes);
  if (status != 0) throw Error("cannot start a thread to run in");
  pthread_join(thread, nullptr);
}

}  // namespace lockstep::detail
