#pragma once

#include <charconv>
#include <cstdlib>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep {

LOCKSTEP_INLINE std::optional<std::string> process_variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

}  // namespace lockstep

namespace lockstep::detail {

LOCKSTEP_INLINE std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

LOCKSTEP_INLINE std::optional<int> integer_variable(const Variables& variables, const char* name, int least,
                                                    int most) {
  const auto text = variables(name);
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (!value)
    throw UsageError(
        detail::formatted("{}={} is not a whole number. Set it to one, or unset it", name, *text));
  if (*value < least || *value > most)
    throw UsageError(
        most == 2147483647
            ? detail::formatted("{}={} is too small: it must be at least {}", name, *text, least)
            : detail::formatted("{}={} is out of range: it must be in {} to {}", name, *text, least, most));
  return value;
}

LOCKSTEP_INLINE std::optional<int> timeout_variable(const Variables& variables) {
  return integer_variable(variables, "LOCKSTEP_TIMEOUT", 1);
}

LOCKSTEP_INLINE std::optional<int> heartbeat_timeout_variable(const Variables& variables) {
  return integer_variable(variables, "LOCKSTEP_HEARTBEAT_TIMEOUT", 1);
}

LOCKSTEP_INLINE std::string rendezvous_url(const Variables& variables, bool needed) {
  if (const auto url = variables("LOCKSTEP_RENDEZVOUS")) return *url;
  const auto address = variables("MASTER_ADDR");
  const auto port = integer_variable(variables, "MASTER_PORT", 1, 65535);
  if (address && port) return detail::formatted("tcp://{}:{}", *address, *port);
  if (needed)
    throw UsageError(detail::formatted(
        "{} is not set: the ranks need to know where to meet. Set MASTER_ADDR to the host of "
        "rank 0 and MASTER_PORT "
        "to a free port there, the same on every rank",
        address ? "MASTER_PORT" : "MASTER_ADDR"));
  return {};
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE RendezvousUrl parse_rendezvous(const std::string& url) {
  RendezvousUrl parsed;
  if (url.starts_with("file:///") && url.size() > 8) {
    parsed.path = url.substr(7);
    return parsed;
  }
  if (url.starts_with("tcp://")) {
    const auto rest = std::string_view(url).substr(6);
    const auto colon = rest.rfind(':');
    if (colon != std::string_view::npos && colon > 0) {
      const auto port = detail::whole_number(rest.substr(colon + 1));
      parsed.host = rest.substr(0, colon);
      if (parsed.host.size() > 2 && parsed.host.front() == '[' && parsed.host.back() == ']')
        parsed.host = parsed.host.substr(1, parsed.host.size() - 2);  // an IPv6 address
      parsed.port = port.value_or(-1);
      if (port && parsed.port > 0 && parsed.port <= 65535) return parsed;
    }
  }
  throw UsageError(detail::formatted(
      "the rendezvous '{}' is neither tcp://HOST:PORT nor file:///ABSOLUTE/PATH: write it as one of them",
      url));
}

LOCKSTEP_INLINE std::string read_store_secret(const Variables& variables) {
  auto secret = variables("LOCKSTEP_STORE_SECRET").value_or("");
  constexpr std::size_t longest = 256;
  if (secret.size() > longest)
    throw UsageError(detail::formatted("LOCKSTEP_STORE_SECRET has {} characters: give it at most {}",
                                       secret.size(), longest));
  return secret;
}

LOCKSTEP_INLINE Environment read_environment(const Variables& variables) {
  Environment env;
  const auto size = detail::integer_variable(variables, "WORLD_SIZE", 1);
  const auto rank = detail::integer_variable(variables, "RANK", 0);
  const auto local_size = detail::integer_variable(variables, "LOCAL_WORLD_SIZE", 1);
  const auto local_rank = detail::integer_variable(variables, "LOCAL_RANK", 0);
  if (rank && !size)
    throw UsageError(detail::formatted(
        "RANK={} is set but WORLD_SIZE is not: set WORLD_SIZE to the number of all ranks", *rank));
  if (!rank && size && *size > 1)
    throw UsageError(
        detail::formatted("WORLD_SIZE={} is set but RANK is not: set RANK to this process's number, 0 to {}",
                          *size, *size - 1));
  env.rank = rank.value_or(0);
  env.size = size.value_or(1);
  if (env.rank >= env.size)
    throw UsageError(detail::formatted("RANK={} is out of range: with WORLD_SIZE={} it must be in 0 to {}",
                                       env.rank, env.size, env.size - 1));
  env.launched = local_rank.has_value() && rank.has_value();
  env.local_rank = local_rank.value_or(0);
  if (local_rank && !local_size && env.size > 1)
    throw UsageError(detail::formatted(
        "LOCAL_RANK={} is set but LOCAL_WORLD_SIZE is not: set LOCAL_WORLD_SIZE to the number of "
        "ranks on this host, or unset LOCAL_RANK",
        *local_rank));
  env.local_size = local_size.value_or(1);
  if (env.local_size > env.size)
    throw UsageError(
        detail::formatted("LOCAL_WORLD_SIZE={} contradicts WORLD_SIZE={}: a host cannot run more ranks than "
                          "there are",
                          env.local_size, env.size));
  if (env.local_rank >= env.local_size)
    throw UsageError(
        detail::formatted("LOCAL_RANK={} is out of range: with LOCAL_WORLD_SIZE={} it must be in 0 to {}",
                          env.local_rank, env.local_size, env.local_size - 1));
  if (env.local_rank > env.rank)
    throw UsageError(
        detail::formatted("LOCAL_RANK={} contradicts RANK={}: a rank on this host cannot be smaller than its "
                          "number here",
                          env.local_rank, env.rank));
  env.rendezvous = detail::rendezvous_url(variables, env.size > 1);
  if (!env.rendezvous.empty()) parse_rendezvous(env.rendezvous);
  env.store_secret = read_store_secret(variables);
  const auto agent = variables("TORCHELASTIC_USE_AGENT_STORE");
  env.store_outlives_attempts = agent == "True" || agent == "1";
  env.store_is_hosted = env.store_outlives_attempts || variables("LOCKSTEP_STORE_IS_HOSTED").has_value();
  return env;
}

}  // namespace lockstep
