#include "memory.hpp"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

namespace zb {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + strerror(errno));
}

}  // namespace

std::shared_ptr<File> File::create(const std::string& label) {
  int fd = memfd_create(label.c_str(), MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create(" + label + ")");
  return std::shared_ptr<File>(new File(fd));
}

std::shared_ptr<File> File::open(int pid, int fd) {
  if (pid == getpid()) {  // /proc may number processes otherwise than this namespace does
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) fail("cannot open the memory of a rank of this process");
    return std::shared_ptr<File>(new File(own));
  }
  std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  int mine = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (mine < 0) fail("cannot map the memory of a rank on this host, " + path);
  return std::shared_ptr<File>(new File(mine));
}

File::~File() { ::close(fd_); }

void File::grow(size_t bytes) {
  if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) fail("ftruncate of shared memory");
}

void File::punch(size_t offset, size_t bytes) {
  // Only gives memory back early; where the kernel refuses, it goes with the file.
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

Mapping::Mapping(const File& file, size_t offset, size_t bytes) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.fd(),
                  static_cast<off_t>(offset));
  if (at == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<char*>(at);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

}  // namespace zb
