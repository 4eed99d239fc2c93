#pragma once

#include <signal.h>

#include <cstring>
#include <regex>
#include <sstream>
#include <string>

#include "lockstep/error.hpp"

namespace lockstep_test {

/// What a program has said on stderr about the failure that ended it, as values.
struct Reported {
  lockstep::Failure failure;  ///< of the rank to blame, and of a mismatch of both
  int noticed_by = -1;        ///< the rank that has thrown the consequence, if that is the error
  int errors = 0;             ///< the lines that begin with "error: "; the values are those of the first
  bool alone = false;         ///< it is all that was written
};

/// Reads the line of `launch` and of a rank about a failure. No other place in the tests knows these texts, except
/// supervisor_test.cpp, which fixes how world/detail/failure_text.hpp makes them.
inline Reported reported(const std::string& error) {
  using lockstep::FailureKind;
  Reported result;
  std::string text;
  std::istringstream in(error);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("error: ") && ++result.errors == 1) text = line.substr(7);
  result.alone = result.errors == 1 && error == "error: " + text + "\n";
  lockstep::Failure& failure = result.failure;
  std::smatch found;
  const auto matches = [&](const char* pattern) {
    return std::regex_match(text, found, std::regex(pattern));
  };
  const auto number = [&](std::size_t group) { return std::stoi("0" + found.str(group)); };

  if (matches(R"((.*); noticed by rank (\d+)( \(pid \d+\))?)")) {
    result.noticed_by = number(2);
    text = std::string(found[1]);
  }
  failure.message = text;
  if (matches(R"(the ranks disagree on collective #(\d+).*: rank (\d+) called (\w+).*, )"
              R"(but rank (\d+) called .*)")) {
    failure.kind = FailureKind::mismatch;
    failure.rank = number(2);
    failure.cause = number(4);
    failure.call = {.operation = found.str(3), .sequence = std::stoull(found.str(1))};
    return result;
  }
  if (matches(R"(rank (\d+) (?:has left after|is in) .*, (?:and )?rank (\d+) (?:after|in) .*)")) {
    failure.kind = FailureKind::mismatch;
    failure.rank = number(1);
    failure.cause = number(2);
    return result;
  }
  if (!matches(R"(rank (\d+)(?: \(pid (\d+)(?: on ([^)]*))?\))? ((?:failed|died|ended|has|does)\b.*))")) {
    failure.kind = FailureKind::usage;
    return result;
  }
  failure.rank = number(1);
  failure.pid = number(2);
  failure.host = found.str(3);
  failure.message = text = std::string(found[4]);
  if (matches(R"(failed(?: first)?: (.*))")) {
    failure.message = found.str(1);
  } else if (matches(R"((?:died \(|ended by )SIG([A-Z0-9]+)(?: on (\S+))?.*)")) {
    failure.kind = FailureKind::died;
    if (found[2].matched) failure.host = found.str(2);
    for (int signal = 1; signal < NSIG; ++signal)
      if (const char* name = sigabbrev_np(signal); name != nullptr && found.str(1) == name)
        failure.code = 128 + signal;
  } else if (matches(R"(ended with exit code (\d+)(?: on (\S+))?.*)")) {
    failure.kind = FailureKind::died;
    failure.code = number(1);
    if (found[2].matched) failure.host = found.str(2);
  } else if (matches(R"(has (?:left after|ended with exit code 0) .*)")) {
    failure.kind = FailureKind::left_early;
    if (matches(R"(.* while rank \d+ waits in (\w+) #(\d+).*)"))
      failure.call = {.operation = found.str(1), .sequence = std::stoull(found.str(2))};
  } else if (matches(R"((?:has ended|does not answer).*)")) {  // its connection shows no more than that
    failure.kind = FailureKind::died;
  }
  return result;
}

}  // namespace lockstep_test
