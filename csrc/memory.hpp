/// Memory that processes of one host share: anonymous files, found through /proc, gone with the
/// last process that maps them. Nothing is ever named in /dev/shm.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace zb {

/// An open anonymous file; closed with the last owner.
class File {
 public:
  /// A new memfd. `label` only shows in /proc.
  static std::shared_ptr<File> create(const std::string& label);
  /// The file that process `pid` holds as descriptor `fd`.
  static std::shared_ptr<File> open(int pid, int fd);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  /// Grows the file to `bytes`; its pages cost nothing until they are touched.
  void grow(size_t bytes);
  /// Gives the pages of a range back; they read as zeros from then on.
  void punch(size_t offset, size_t bytes);

 private:
  explicit File(int fd) : fd_(fd) {}
  int fd_;
};

/// A mapped range of a File; unmapped with the last owner, and independent of the descriptor.
class Mapping {
 public:
  Mapping(const File& file, size_t offset, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  char* data_;
  size_t bytes_;
};

constexpr size_t kPage = 4096;
inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace zb
