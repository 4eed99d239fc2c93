#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/log/detail/console.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::inline v0_1::detail {

LOCKSTEP_INLINE std::optional<Level> level_named(std::string_view name) {
  if (name == "debug") return Level::debug;
  if (name == "info") return Level::info;
  if (name == "warning") return Level::warning;
  if (name == "error") return Level::error;
  return std::nullopt;
}

LOCKSTEP_INLINE Level level_of_environment() {
  const char* name = std::getenv("LOCKSTEP_LOG_LEVEL");
  return level_named(name ? name : "info").value_or(Level::info);
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

LOCKSTEP_INLINE void Log::write(Level level, fmt::string_view format, fmt::format_args args) const {
  const std::string whole = fmt::vformat(format, args);
  std::string_view text = whole;
  static constexpr const char* names[] = {"debug: ", "", "warning: ", "error: "};
  const std::string front =
      (every_rank_ ? detail::formatted("[rank {}] ", rank_) : std::string()) + names[static_cast<int>(level)];
  std::string lines;
  // Every line of a multi-line text gets the prefix.
  while (true) {
    const auto end = text.find('\n');
    lines += front;
    lines += text.substr(0, end);
    lines += '\n';
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  detail::write_lines(level >= Level::warning ? stderr : stdout, lines);
}

namespace detail {

LOCKSTEP_INLINE std::string clock_text(double seconds) {
  const long all = std::lround(std::max(0.0, seconds));
  if (all >= 3600) return detail::formatted("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
  return detail::formatted("{}:{:02}", all / 60, all % 60);
}

/// Returns the numbers of a progress line: `788/1875, 10432 samples/s, loss 0.4321, 0:17 left`.
inline std::string progress_facts(const ProgressState& state) {
  const double rate = state.seconds > 0 ? state.samples / state.seconds : 0;
  const double left = state.done > 0
                          ? state.seconds / static_cast<double>(state.done) *
                                static_cast<double>(state.total - std::min(state.done, state.total))
                          : 0;
  auto text = state.total > 0 ? detail::formatted("{}/{}", state.done, state.total)
                              : detail::formatted("{}", state.done);
  text += detail::formatted(", {:.{}f} samples/s", rate, rate < 10 ? 2 : 0);
  if (state.loss) text += detail::formatted(", loss {:.4f}{}", *state.loss, state.more);
  return text + detail::formatted(", {} {}", clock_text(state.done >= state.total ? state.seconds : left),
                                  state.done >= state.total ? "in all" : "left");
}

LOCKSTEP_INLINE std::string progress_line(const ProgressState& state) {
  return detail::formatted("{}{}{}", state.title, state.title.empty() ? "" : ": ", progress_facts(state));
}

LOCKSTEP_INLINE std::string progress_bar(const ProgressState& state, int columns) {
  if (state.total == 0)  // an unknown total has no percentage
    return progress_line(state).substr(0, static_cast<std::size_t>(std::max(columns - 1, 0)));
  const double share = std::min(1.0, static_cast<double>(state.done) / static_cast<double>(state.total));
  const auto front = detail::formatted("{}{}{:3.0f} % ", state.title, state.title.empty() ? "" : " ",
                                       std::floor(100 * share));
  const auto facts = progress_facts(state);
  const int room = columns - 1 - static_cast<int>(front.size() + facts.size()) - 3;
  std::string bar;
  if (room >= 5) {
    const int width = std::min(room, 40);
    const int full = static_cast<int>(share * width);
    bar = detail::formatted("[{}{}] ", std::string(static_cast<std::size_t>(full), '#'),
                            std::string(static_cast<std::size_t>(width - full), '.'));
  }
  return (front + bar + facts).substr(0, static_cast<std::size_t>(std::max(columns - 1, 0)));
}

}  // namespace detail

LOCKSTEP_INLINE Progress::Progress(const Log& log, std::size_t total, ProgressOptions options)
    : options_(std::move(options)),
      enabled_(log.should_log(Level::info)),
      terminal_(detail::stdout_is_terminal()) {
  state_.title = options_.title;
  state_.total = total;
}

LOCKSTEP_INLINE bool Progress::due() const {
  return enabled_ && Clock::now() - last_ >= (terminal_ ? options_.redraw : options_.line_every);
}

LOCKSTEP_INLINE void Progress::advance(double samples, std::optional<double> loss) {
  ++state_.done;
  state_.samples += samples;
  state_.loss = loss;  // an earlier step's loss is outdated
  if (!due()) return;
  last_ = Clock::now();
  show();
}

LOCKSTEP_INLINE void Progress::finish(std::optional<double> loss, std::string more) {
  if (loss) state_.loss = loss;
  state_.more = std::move(more);
  if (std::exchange(finished_, true) || !enabled_ || !shown_) return;
  show();
  if (terminal_) {
    detail::bar_is_shown = false;
    std::fputs("\n", stdout);
    std::fflush(stdout);
  }
}

LOCKSTEP_INLINE void Progress::show() {
  state_.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  shown_ = true;
  if (!terminal_) {
    detail::write_lines(stdout, detail::progress_line(state_) + "\n");
    return;
  }
  // The carriage return comes last, so that the next writer, also one behind a launcher, starts on a full line.
  const auto bar = detail::progress_bar(state_, detail::terminal_columns()) + "\x1b[K\r";
  std::fwrite(bar.data(), 1, bar.size(), stdout);
  std::fflush(stdout);
  detail::bar_is_shown = true;
}

}  // namespace lockstep::inline v0_1
