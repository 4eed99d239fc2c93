#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

/// A string literal as a template argument.
template <std::size_t size>
struct MetricName {
  char text[size];  // NOLINT(modernize-avoid-c-arrays): a structural type
  consteval MetricName(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  [[nodiscard]] constexpr std::string_view view() const { return {text, size - 1}; }
};

/// A metric with a name; see `named`.
template <MetricName metric_name, class Metric>
struct Named {
  static constexpr std::string_view name = metric_name.view();
  Metric metric;
};

template <class T>
inline constexpr bool is_named = false;
template <MetricName name, class Metric>
inline constexpr bool is_named<Named<name, Metric>> = true;

template <class M>
concept NamedMetric = is_named<std::remove_cvref_t<M>>;

/// Returns the metric without its name.
template <class M>
auto& unnamed(M& metric) {
  if constexpr (NamedMetric<M>)
    return metric.metric;
  else
    return metric;
}
template <class M>
using Unnamed = std::remove_reference_t<decltype(unnamed(std::declval<std::remove_reference_t<M>&>()))>;

template <class... Metrics>
consteval bool names_differ() {
  if constexpr ((NamedMetric<Metrics> && ...) && sizeof...(Metrics) > 1) {
    std::array<std::string_view, sizeof...(Metrics)> names{Metrics::name...};
    std::sort(names.begin(), names.end());
    return std::adjacent_find(names.begin(), names.end()) == names.end();
  } else {
    return true;
  }
}

/// The return type of an invalid call of evaluate: converts to any type, so that a static_assert is the only
/// error.
struct NotMeasured {
  template <class T>
  operator T() const;
};

}  // namespace lockstep::detail

namespace lockstep {

/// Names a metric for evaluate: `named<"accuracy">(Accuracy{})`. Either all metrics of a call have a name or
/// none.
template <detail::MetricName name, class Metric>
detail::Named<name, std::decay_t<Metric>> named(Metric&& metric) {
  return {std::forward<Metric>(metric)};
}

/// The results of an evaluate whose metrics have names. `get<"accuracy">(results)` returns a result; a name
/// that no metric has does not compile. `values` holds the results in the order of the metrics, `names()`
/// their names.
template <class... Results>
struct NamedResults {
  std::tuple<typename Results::Type...> values;

  [[nodiscard]] static constexpr std::array<std::string_view, sizeof...(Results)> names() {
    return {Results::name...};
  }
};

}  // namespace lockstep

namespace lockstep::detail {

/// The name and the type of one result.
template <MetricName result_name, class T>
struct NamedResult {
  static constexpr std::string_view name = result_name.view();
  using Type = T;
};

// The types of the results of metrics with names.
template <class Metric, class T>
struct ResultOfNamed;
template <MetricName name, class Metric, class T>
struct ResultOfNamed<Named<name, Metric>, T> {
  using type = NamedResult<name, T>;
};

/// Returns the results as evaluate returns them: one, a tuple, or a NamedResults.
template <class... Metrics, class... Results>
auto named_results(std::tuple<Results...>&& results) {
  if constexpr ((NamedMetric<Metrics> && ...))
    return NamedResults<typename ResultOfNamed<Metrics, Results>::type...>{std::move(results)};
  else if constexpr (sizeof...(Metrics) == 1)
    return std::get<0>(std::move(results));
  else
    return std::move(results);
}

}  // namespace lockstep::detail

namespace lockstep {

/// Returns the result of the metric with this name.
template <detail::MetricName name, class... Results>
[[nodiscard]] constexpr auto get(const NamedResults<Results...>& results) {
  constexpr auto names = NamedResults<Results...>::names();
  constexpr auto found = std::find(names.begin(), names.end(), name.view()) - names.begin();
  constexpr bool known = found < static_cast<std::ptrdiff_t>(sizeof...(Results));
  static_assert(known, "lockstep: no metric of this evaluate has the name that get<\"name\"> asks for");
  return std::get < known ? static_cast<std::size_t>(found) : 0 > (results.values);
}

}  // namespace lockstep
