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

/// Data whose length nobody knows beforehand: `next()` gives this rank's next batch, or nothing once its pass
/// is over. What falls to which rank is the stream's own affair. Ranks may get batches of unequal size and
/// run out at different times: one that has none left takes part in the others' steps with a weight of zero,
/// and all stop together once no rank has any. It has no forward in such a step, so with a model whose
/// forward itself communicates (synchronised batch norm) every rank needs equally many batches: where one has
/// run out before others, all throw DataError.
///
/// With a `set_epoch(e)` a stream can be read again: it is called before each pass, with the number of the
/// epoch. Without, it has one pass. Used from the training thread.
template <class S>
concept BatchStream = !Dataset<S> && requires(S & stream) {
  requires detail::is_optional<std::remove_cvref_t<decltype(stream.next())>>;
};

/// A stream that can be read again.
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

/// The batches of a dataset or of a stream.
template <class D>
requires Dataset<D> || BatchStream<D>
using BatchFrom = typename detail::BatchMadeBy<D>::type;

}  // namespace lockstep
