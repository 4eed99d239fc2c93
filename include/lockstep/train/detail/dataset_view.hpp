#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>

#include "lockstep/data/dataset.hpp"

namespace lockstep::detail {

/// A non-owning view of a dataset, for loaders, which hold their dataset by value.
template <Dataset D>
class DatasetView {
 public:
  explicit DatasetView(D& dataset) : dataset_(&dataset) {}

  [[nodiscard]] std::size_t size() const { return dataset_size(*dataset_); }
  decltype(auto) get(std::size_t index) const requires IndexedDataset<D> { return dataset_->get(index); }
  decltype(auto) get_batch(c10::ArrayRef<std::size_t> indices) const requires BatchedDataset<D> {
    return dataset_->get_batch(indices);
  }

 private:
  D* dataset_;
};

}  // namespace lockstep::detail
