#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/report/metrics_files.hpp"

namespace lockstep::inline v0_1::detail {

inline constexpr std::string_view metrics_header =
    "time,event,epoch,step,loss,lr,samples_per_second,seconds,skipped,tag,value";

/// The values of one line.
struct MetricsLog::Row {
  std::string_view event;
  std::optional<std::int64_t> epoch = {}, step = {};
  std::optional<double> loss = {}, lr = {}, samples_per_second = {}, seconds = {};
  std::optional<std::int64_t> skipped = {};
  std::optional<std::string_view> tag = {};
  std::optional<double> value = {};

  template <class Function>
  void each(Function&& function) const {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    function("time", std::optional(formatted("{:.3f}", now.count())));
    function("event", std::optional(event));
    function("epoch", epoch);
    function("step", step);
    function("loss", loss);
    function("lr", lr);
    function("samples_per_second", samples_per_second);
    function("seconds", seconds);
    function("skipped", skipped);
    function("tag", tag);
    function("value", value);
  }
};

/// Quotes where CSV needs it. A line break becomes a space: a row is a line.
inline std::string csv_string(std::string_view text) {
  std::string field;
  bool quoted = false;
  for (const char character : valid_utf8(text)) {
    quoted = quoted || character == ',' || character == '"';
    if (character == '"') field += '"';
    field += character == '\n' || character == '\r' ? ' ' : character;
  }
  return quoted ? '"' + field + '"' : field;
}

template <class Value>
std::string field_text(MetricsFormat format, const Value& value) {
  const bool json = format == MetricsFormat::json;
  if constexpr (std::is_same_v<Value, std::string>)
    return value;  // a number
  else if constexpr (std::is_same_v<Value, std::string_view>)
    return json ? json_string(value) : csv_string(value);
  else if constexpr (std::is_same_v<Value, double>)
    return json ? json_number(value) : formatted("{}", value);
  else
    return formatted("{}", value);
}

/// Returns whether `line`, which has no newline, is empty or the beginning of a line of JsonLines: `{"time":`
/// and a number without a space.
inline bool is_torn_json(std::string_view line) {
  constexpr std::string_view begin = "{\"time\":";
  if (line.size() <= begin.size()) return begin.starts_with(line);
  return line.starts_with(begin) && line[begin.size()] >= '0' && line[begin.size()] <= '9';
}

LOCKSTEP_INLINE MetricsLog::MetricsLog(const World& world, const std::filesystem::path& path,
                                       MetricsOptions options, MetricsFormat format)
    : format_(format), meter_(options.every, "MetricsOptions") {
  if (world.rank() != 0) return;
  file_ = AppendFile(path, world.log);
  const FileLines lines = file_.lines();
  if (format_ == MetricsFormat::json) {
    if (is_torn_json(lines.unfinished))
      file_.remove_unfinished(lines);
    else
      file_.give_up("its last line has no newline, and is not one of a JsonLines");
  } else if (lines.first ? *lines.first != metrics_header : !metrics_header.starts_with(lines.unfinished)) {
    file_.give_up("its first line is not the header of a CsvLog");
  } else {
    file_.remove_unfinished(lines);
    if (!lines.first) file_.append(std::string(metrics_header) + '\n');
  }
}

LOCKSTEP_INLINE void MetricsLog::on_profile(const StepReport& report, const StepProfile& profile) {
  if (!file_.open()) return;
  if (const auto now = meter_.take(report, profile))
    write({.event = "step",
           .epoch = now->epoch,
           .step = now->step,
           .loss = now->loss,
           .lr = now->lr,
           .samples_per_second = now->samples_per_second,
           .seconds = now->seconds});
}

LOCKSTEP_INLINE void MetricsLog::on_epoch(const EpochReport& report) {
  write({.event = "epoch",
         .epoch = report.epoch,
         .step = report.step,
         .loss = report.loss,
         .seconds = report.seconds,
         .skipped = report.skipped});
}

LOCKSTEP_INLINE void MetricsLog::add_scalar(std::string_view tag, double value, std::int64_t step) {
  write({.event = "scalar", .step = step, .tag = tag, .value = value});
}

LOCKSTEP_INLINE void MetricsLog::write(const Row& row) {
  if (!file_.open()) return;
  std::string line;
  const bool json = format_ == MetricsFormat::json;
  row.each([&](std::string_view name, const auto& value) {
    if (value && json) line += (line.empty() ? "{" : ",") + json_string(name) + ':';
    if (value) line += field_text(format_, *value);
    if (!json) line += ',';
  });
  if (!json) line.pop_back();
  line += json ? "}\n" : "\n";
  file_.append(line);
}

}  // namespace lockstep::inline v0_1::detail
