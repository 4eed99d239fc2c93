#pragma once

#include <concepts>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/data/dataset.hpp"

namespace lockstep::detail {
template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
}  // namespace lockstep::detail

namespace lockstep {

/// A data source of unknown length: `next()` returns this rank's next batch, or std::nullopt at the end of
/// its pass. The stream itself decides which data each rank gets.
///
/// Ranks may get batches of unequal size and run out at different times. A rank without data takes part in
/// the other ranks' steps with a weight of zero; all ranks stop together once none has data left. A rank has
/// no forward in such a step. For a model whose forward communicates (synchronized batch norm), every rank
/// therefore needs the same number of batches; otherwise all ranks throw DataError.
///
/// A stream with `set_epoch(e)` is repeatable: `set_epoch` is called before each pass with the epoch's
/// number. A stream without it has one pass. Used from the training thread only.
/// Counterpart: torch.utils.data.IterableDataset.
template <class S>
concept BatchStream = !Dataset<S> && requires(S & stream) {
  requires detail::is_optional<std::remove_cvref_t<decltype(stream.next())>>;
};

/// A stream that supports several passes.
template <class S>
concept RepeatableStream = BatchStream<S> && requires(S& stream, std::size_t epoch) {
  stream.set_epoch(epoch);
};

}  // namespace lockstep

namespace lockstep::detail {

template <class D>
struct BatchMadeBy;
template <Dataset D>
struct BatchMadeBy<D> {
  using type = BatchOf<D>;
};
template <BatchStream S>
struct BatchMadeBy<S> {
  using type = typename std::remove_cvref_t<decltype(std::declval<S&>().next())>::value_type;
};

}  // namespace lockstep::detail

namespace lockstep {

/// The batch type of a dataset or of a stream.
template <class D>
requires Dataset<D> || BatchStream<D>
using BatchFrom = typename detail::BatchMadeBy<D>::type;

}  // namespace lockstep
