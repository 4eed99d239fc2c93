#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/lists.hpp"

namespace lockstep::inline v0_1::detail {

/// The public call of lockstep that a collective serves, as error messages name it. Both names are string
/// literals or null, so that a collective copies them without an allocation.
struct ServedCall {
  const char* name = nullptr;  // of the outermost call, or null in the program's own code
  const char* part = nullptr;  // of the innermost call inside it, null if there is none
};

/// Returns "Trainer::fit (DistributedDataParallel::backward)", empty without a name.
inline std::string served_text(std::string_view name, std::string_view part) {
  std::string text(name);
  if (!part.empty()) text.append(" (").append(part).append(")");
  return text;
}
inline std::string served_text(const ServedCall& call) {
  return served_text(call.name ? call.name : "", call.part ? call.part : "");
}

/// The public call that this thread runs.
LOCKSTEP_PROCESS_WIDE inline constinit thread_local ServedCall served_call{};

/// Names the public call that this thread runs while the scope lives. Scopes nest: the outermost call keeps
/// its name and the innermost one becomes its part.
class CallScope {
 public:
  explicit CallScope(const char* name) : before_(served_call) {
    (served_call.name ? served_call.part : served_call.name) = name;
  }
  /// Continues a call on another thread. An empty ServedCall begins the program's own code, such as a callback.
  explicit CallScope(const ServedCall& call) : before_(std::exchange(served_call, call)) {}
  ~CallScope() { served_call = before_; }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const ServedCall before_;
};

/// The name of a public call as an exchange of bytes sends it: truncated, padded with zeros.
using SentName = std::array<char, 56>;

inline SentName sent_name(const ServedCall& call) {
  SentName sent{};
  if (call.name) std::memcpy(sent.data(), call.name, std::min(std::strlen(call.name), sent.size() - 1));
  return sent;
}

/// Returns "rank 0 is in Trainer::evaluate, ranks 1 and 2 in Trainer::fit; call both on every rank, and equally often"
/// if two of `names` differ, else an empty text. An empty name fits every other. `ranks` holds the rank of each name.
inline std::string different_calls(const std::vector<std::string>& names, const std::vector<int>& ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> places;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) continue;
    const auto known = std::find_if(places.begin(), places.end(),
                                    [&](const auto& place) { return place.first == names[i]; });
    (known == places.end() ? places.emplace_back(names[i], std::vector<int>()) : *known)
        .second.push_back(ranks[i]);
  }
  if (places.size() < 2) return {};
  std::string text;
  for (const auto& [name, who] : places) {
    text += (text.empty() ? "" : ", ") + listed_ranks(who);
    text += &name != &places[0].first ? " in " : who.size() > 1 ? " are in " : " is in ";
    text += name;
  }
  return text + (places.size() == 2 ? "; call both on every rank" : "; call all of them on every rank") +
         ", and equally often";
}

}  // namespace lockstep::inline v0_1::detail
