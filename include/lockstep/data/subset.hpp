#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>

#include "lockstep/data/dataset.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// The samples of a dataset at the given indices, in their order. An index may occur several times. Holds the
/// dataset by value; `get` and `get_batch` are those of the dataset.
/// Counterpart: torch.utils.data.Subset.
template <Dataset D>
class Subset {
 public:
  /// Throws DataError if an index is not below the size of the dataset.
  Subset(D dataset, std::vector<std::size_t> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    const std::size_t size = dataset_size(dataset_);
    for (const std::size_t index : indices_)
      if (index >= size)
        throw DataError(detail::formatted(
            "a Subset got the index {} into a dataset of {} samples: give indices below that", index, size));
  }

  [[nodiscard]] std::size_t size() const { return indices_.size(); }
  decltype(auto) get(std::size_t index) requires IndexedDataset<D> {
    return dataset_.get(indices_.at(index));
  }
  decltype(auto) get_batch(c10::ArrayRef<std::size_t> indices) requires BatchedDataset<D> {
    std::vector<std::size_t> inner;
    inner.reserve(indices.size());
    for (const std::size_t index : indices) inner.push_back(indices_.at(index));
    return dataset_.get_batch(inner);
  }

  /// Returns the indices into the inner dataset.
  [[nodiscard]] const std::vector<std::size_t>& indices() const { return indices_; }

 private:
  D dataset_;
  std::vector<std::size_t> indices_;
};

}  // namespace lockstep::inline v0_1
