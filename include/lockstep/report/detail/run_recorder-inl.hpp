#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>

#include <ATen/Parallel.h>
#include <torch/version.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/report/detail/run_page.hpp"
#include "lockstep/report/detail/run_recorder.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/world_state.hpp"

namespace lockstep::inline v0_1::detail {

inline std::string json_list(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ",\n") + part;
  return text;
}

/// Returns the first line of /proc/cpuinfo that names a model, empty if there is none.
inline std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const auto colon = line.find(':'); colon + 2 < line.size()) return line.substr(colon + 2);
  return "";
}

inline std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

LOCKSTEP_INLINE void SparseSeries::keep(double x, double y) {
  values_.emplace_back(x, y);
  if (values_.size() < 1024) return;
  std::vector<std::pair<double, double>> kept;
  for (std::size_t i = 0; i < values_.size(); i += 2) kept.push_back(values_[i]);
  values_ = std::move(kept);
  stride_ *= 2;
}

LOCKSTEP_INLINE std::string SparseSeries::json() const {
  std::string text;
  for (const auto& [x, y] : values_)
    text += formatted("{}[{},{}]", text.empty() ? "" : ",", json_number(x), json_number(y));
  return '[' + text + ']';
}

LOCKSTEP_INLINE void RunRecorder::step(const StepReport& report, const StepProfile& profile, bool loss) {
  using Seconds = std::chrono::duration<double>;
  const auto& spans = profile.spans;
  if (spans.empty()) return;
  ++steps_;
  seconds_ += profile.seconds();
  samples_ += profile.samples;
  Seconds waited{0};  // for the ranks, before the gradients of this step were ready
  auto gradients = spans.front().begin;
  for (const PhaseSpan& span : spans) {
    phases_[static_cast<std::size_t>(span.phase)] += Seconds(span.end - span.begin).count();
    if (span.phase == StepPhase::backward) gradients = span.end;
  }
  for (const PhaseSpan& span : spans)
    if (span.phase == StepPhase::communication && span.end <= gradients) waited += span.end - span.begin;
  const auto since = reduced_.value_or(spans.front().begin);
  const double busy = (Seconds(gradients - since) - waited).count();
  busy_ += busy;
  busy_series_.add(static_cast<double>(report.step), [&] { return busy; });
  reduced_ = gradients;
  for (const PhaseSpan& span : spans)
    if (span.phase == StepPhase::communication && span.begin >= gradients) reduced_ = span.end;

  if (loss) losses_.add(static_cast<double>(report.step), [&] { return report.loss(); });
  last_ = traced(report, profile);
}

LOCKSTEP_INLINE std::string RunRecorder::take_epoch(const World& world) {
  using Seconds = std::chrono::duration<double>;
  std::string phases, spans, buckets;
  for (const double seconds : phases_)
    phases += formatted("{}{}", phases.empty() ? "" : ",", json_number(seconds));
  const std::string sums = formatted(
      "{{\"rank\":{},\"steps\":{},\"seconds\":{},\"samples\":{},\"busy\":{},\"phases\":[{}]}}", world.rank(),
      steps_, json_number(seconds_), json_number(samples_), json_number(busy_), phases);
  if (!last_.spans.empty()) {
    const auto zero = last_.spans.front().begin;
    const auto at = [&](auto time) { return json_number(Seconds(time - zero).count()); };
    for (const PhaseSpan& span : last_.spans)
      spans += formatted("{}[{},{},{}]", spans.empty() ? "" : ",", static_cast<int>(span.phase),
                         at(span.begin), at(span.end));
    const auto lanes = bucket_lanes(last_.buckets);
    for (std::size_t b = 0; b < last_.buckets.size(); ++b)
      if (const BucketReport& bucket = last_.buckets[b]; bucket.completed > bucket.launched)
        buckets += formatted(
            "{}[{},{},{},{},{}]", buckets.empty() ? "" : ",", b,
            at(last_.began + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(bucket.launched))),
            at(last_.began + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(bucket.completed))),
            bucket.bytes, lanes[b]);
  }
  const std::string detail = formatted(
      "{{\"rank\":{},\"host\":{},\"pid\":{},\"threads\":{},\"cpu\":{},\"busy\":{},\"step\":{},"
      "\"spans\":[{}],\"buckets\":[{}]}}",
      world.rank(), json_string(host_name()), ::getpid(), at::get_num_threads(), json_string(cpu_model()),
      busy_series_.json(), last_.step, spans, buckets);
  steps_ = 0;
  seconds_ = samples_ = busy_ = 0;
  phases_ = {};
  busy_series_.clear();
  reduced_.reset();
  last_ = {};
  return sums + '\0' + detail;
}

LOCKSTEP_INLINE RunPage::RunPage(std::string title, const World& world, int ranks)
    : title_(std::move(title)) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 64> started{};
  std::strftime(started.data(), started.size(), "%Y-%m-%d %H:%M:%S %z", &local);
  const auto row = [&](std::string_view name, std::string_view value) {
    if (value.empty()) return;
    environment_ +=
        formatted("{}[{},{}]", environment_.empty() ? "" : ",", json_string(name), json_string(value));
  };
  row("started", started.data());
  row("command", command_line());
  row("ranks", formatted("{}", ranks));
  row("launcher", detail::state_of(world).current_environment().launcher);
  row("rendezvous", detail::state_of(world).current_environment().rendezvous);
  row("LibTorch", TORCH_VERSION);
  row("compiler",
#ifdef __clang__
      "clang " __clang_version__
#else
      "gcc " __VERSION__
#endif
  );
  for (const char* name : {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"})
    if (const char* value = std::getenv(name)) row(name, value);
}

LOCKSTEP_INLINE void RunPage::add_epoch(const EpochReport& report, const std::vector<std::string>& ranks) {
  std::vector<std::string> sums, details;
  for (const std::string& of_rank : ranks) {
    const auto zero = of_rank.find('\0');
    sums.push_back(of_rank.substr(0, zero));
    details.push_back(of_rank.substr(std::min(zero, of_rank.size() - 1) + 1));
  }
  epochs_.push_back(formatted(
      "{{\"epoch\":{},\"step\":{},\"loss\":{},\"seconds\":{},\"skipped\":{},\"memory\":{},\"ranks\":[{}]}}",
      report.epoch, report.step, json_number(report.loss), json_number(report.seconds), report.skipped,
      report.peak_memory, json_list(sums)));
  ranks_ = json_list(details);
}

LOCKSTEP_INLINE void RunPage::add_scalar(std::string_view tag, double value, std::int64_t step) {
  const std::string point = formatted("[{},{}]", step, json_number(value));
  for (auto& [name, points] : scalars_)
    if (name == tag) {
      points += ',' + point;
      return;
    }
  scalars_.emplace_back(tag, point);
}

LOCKSTEP_INLINE std::string RunPage::html(const SparseSeries& losses) const {
  std::string scalars;
  for (const auto& [name, points] : scalars_)
    scalars +=
        formatted("{}{{\"tag\":{},\"points\":[{}]}}", scalars.empty() ? "" : ",", json_string(name), points);
  const std::string data = formatted(
      "{{\"title\":{},\"losses\":{},\"scalars\":[{}],\"environment\":[{}],\n\"epochs\":[{}],\n\"ranks\":[{}]}"
      "}",
      json_string(title_), losses.json(), scalars, environment_, json_list(epochs_), ranks_);
  const std::string_view page = run_page;
  const std::string_view place = "/*run*/null";
  const auto at = page.find(place);
  return std::string(page.substr(0, at)) + data + std::string(page.substr(at + place.size()));
}

}  // namespace lockstep::inline v0_1::detail
