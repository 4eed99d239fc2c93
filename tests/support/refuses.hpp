#pragma once

#include <string>
#include <utility>

#include "support/catch.hpp"
#include "support/text_of.hpp"

/// Checks that `work` throws this error, and that its text has these words.
template <class Error, class Work>
void refuses(Work&& work, const std::string& words) {
  CHECK_THAT(text_of<Error>(std::forward<Work>(work)), ContainsSubstring(words));
}
