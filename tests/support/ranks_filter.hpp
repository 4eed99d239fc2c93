#pragma once

#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "support/catch.hpp"

namespace lockstep_test {

/// The number N of a tag "[N+]": the test case needs N or more ranks. 1 where `tags` holds none.
inline int fewest_ranks(std::string_view tags) {
  for (auto open = tags.find('['); open != std::string_view::npos; open = tags.find('[', open + 1)) {
    char* end = nullptr;
    const long ranks = std::strtol(tags.data() + open + 1, &end, 10);
    if (ranks > 1 && std::string_view(end).starts_with("+]")) return static_cast<int>(ranks);
  }
  return 1;
}

/// Leaves out the test cases that are not for this number of ranks: those tagged "[N+]" on fewer than N,
/// those tagged "[alone]" on more than 1. They are not run and not counted. Returns one line that says how
/// many and why; empty where all are run.
inline std::string leave_out(Catch::Session& session, int ranks) {
  std::map<std::string, int> left_out;  // by tag
  int all = 0;
  for (const auto& test : Catch::getRegistryHub().getTestCaseRegistry().getAllTests()) {
    ++all;
    const std::string tags = test.getTestCaseInfo().tagsAsString();
    if (const int fewest = fewest_ranks(tags); fewest > ranks)
      ++left_out[fmt::format("[{}+]", fewest)];
    else if (ranks > 1 && tags.find("[alone]") != std::string::npos)
      ++left_out["[alone]"];
  }
  if (left_out.empty()) return "";

  std::string exclusions, reasons;
  int count = 0;
  for (const auto& [tag, number] : left_out) {
    exclusions += "~" + tag;
    reasons += fmt::format("{}{} tagged {}", reasons.empty() ? "" : ", ", number, tag);
    count += number;
  }
  // A filter that was given is a list of alternatives: each is narrowed.
  auto& filters = session.configData().testsOrTags;
  if (filters.empty()) filters.emplace_back();
  for (std::string& filter : filters) {
    filter.insert(0, exclusions);
    for (std::size_t at = 0; (at = filter.find(',', at)) != std::string::npos; ++at)
      if (filter[at - 1] != '\\') filter.insert(at + 1, exclusions);  // else it is part of a name
  }
  return fmt::format("{} of {} test cases are not for {} rank{} and are left out: {}", count, all, ranks,
                     ranks == 1 ? "" : "s", reasons);
}

}  // namespace lockstep_test
