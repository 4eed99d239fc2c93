#pragma once

#include <string>

/// The text of the Error of that type that `work` throws; empty where it throws none.
template <class Error, class Work>
std::string text_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
