#pragma once

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <sstream>
#include <string>

/// What `object` saves.
template <class T>
std::string saved(const T& object) {
  torch::serialize::OutputArchive archive;
  object.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

/// The archive that these bytes hold.
inline torch::serialize::InputArchive archive_of(const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  return archive;
}

/// Loads `object` from what another has saved.
template <class T>
void load(T& object, const std::string& bytes) {
  auto archive = archive_of(bytes);
  object.load(archive);
}
