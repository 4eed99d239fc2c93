#pragma once

#include <algorithm>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace lockstep_test {

/// A guard against a hang only: a busy machine is slow.
inline constexpr Milliseconds patience(120000);

/// Runs a command whose processes have one thread each: several that wait for each other crawl where the machine is busy.
/// Checks that no process is left.
inline Ended run_example(const std::vector<std::string>& command, Variables variables = {}) {
  variables.insert({"OMP_NUM_THREADS", "1"});
  Ended ended = run(command, std::move(variables), patience);
  INFO("out: " << ended.out << "\nerror: " << ended.error);
  CHECK(ended.left == 0);
  return ended;
}

/// What a command prints that ends well and warns of nothing.
inline std::string out_of(const std::vector<std::string>& command, const Variables& variables = {}) {
  const Ended ended = run_example(command, variables);
  INFO("out: " << ended.out << "\nerror: " << ended.error);
  CHECK(ended.code == 0);
  CHECK(ended.error.empty());
  return ended.out;
}

/// The one line that a command is refused with. Checks exit code 2 and that it prints `before` and no more.
inline std::string refusal_of(const std::vector<std::string>& command, const Variables& variables = {},
                              const std::string& before = "") {
  const Ended ended = run_example(command, variables);
  INFO(Catch::StringMaker<std::vector<std::string>>::convert(command)
       << "\nout: " << ended.out << "\nerror: " << ended.error);
  CHECK(ended.code == 2);
  CHECK(ended.out == before);
  CHECK(count(ended.error, "\n") == 1);
  return ended.error;
}

/// Checks that a command is refused so, and why.
inline void check_refused(const std::vector<std::string>& command, const std::string& why,
                          const Variables& variables = {}, const std::string& before = "") {
  CHECK_THAT(refusal_of(command, variables, before), ContainsSubstring(why));
}

inline std::vector<std::string> joined(std::vector<std::string> words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The number that the first group of `pattern` finds.
inline double number_in(const std::string& text, const std::string& pattern) {
  std::smatch found;
  INFO(pattern << " in:\n" << text);
  REQUIRE(std::regex_search(text, found, std::regex(pattern)));
  return std::stod(found[1]);
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// For output of several ranks, whose lines come in any order.
inline std::vector<std::string> sorted_lines(const std::string& text) {
  auto lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace lockstep_test
