#include "universe.hpp"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace fake {

void Clock::join(const Clock& other) {
  for (int i = 0; i < kActors; ++i) at[i] = std::max(at[i], other.at[i]);
}

Universe::Universe() {
  const char* path = getenv("ZBPIPE_FAKE_CUDA");
  int fd = path != nullptr && *path != 0 ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)
                                         : memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || flock(fd, LOCK_EX) != 0 || ftruncate(fd, sizeof(Shared)) != 0) {
    perror("fake CUDA: shared state");
    abort();
  }
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    perror("fake CUDA: mmap");
    abort();
  }
  shared_ = static_cast<Shared*>(at);
  if (shared_->initialised == 0) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared_->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    shared_->initialised = 1;
  }
  flock(fd, LOCK_UN);
  close(fd);
}

Universe::~Universe() { munmap(shared_, sizeof(Shared)); }

void Universe::lock() {
  // A process that was killed inside leaves what it had written; its clocks are of no use to
  // others.
  if (pthread_mutex_lock(&shared_->mutex) == EOWNERDEAD) pthread_mutex_consistent(&shared_->mutex);
}

void Universe::unlock() { pthread_mutex_unlock(&shared_->mutex); }

int Universe::take_actor() {
  Locked locked(*this);
  for (int i = 0; i < kActors; ++i) {
    if (shared_->taken[i]) continue;
    shared_->taken[i] = true;
    shared_->owner[i] = getpid();
    // Its clock goes on where the last of that number stopped: a finished actor is in the past.
    ++shared_->clocks[i].at[i];
    return i;
  }
  fprintf(stderr, "fake CUDA: more than %d streams and threads\n", kActors);
  abort();
}

void Universe::release_actor(int actor) {
  Locked locked(*this);
  shared_->taken[actor] = false;
}

void Universe::report_locked(const std::string& text) {
  if (shared_->reported < kReports)
    snprintf(shared_->reports[shared_->reported], kReportBytes, "%s", text.c_str());
  ++shared_->reported;
}

void Universe::report(const std::string& text) {
  Locked locked(*this);
  report_locked(text);
}

std::string Universe::reports() {
  Locked locked(*this);
  std::string out;
  for (uint32_t i = 0; i < std::min<uint32_t>(shared_->reported, kReports); ++i)
    out += std::string(shared_->reports[i]) + "\n";
  if (shared_->reported > kReports)
    out += "and " + std::to_string(shared_->reported - kReports) + " more\n";
  return out;
}

int Universe::new_buffer(uint64_t begin, uint64_t end, uint64_t whole) {
  Locked locked(*this);
  for (int i = 0; i < kBuffers; ++i) {
    Buffer& buffer = shared_->buffers[i];
    if (buffer.used) continue;
    buffer = Buffer{};
    buffer.used = buffer.live = true;
    buffer.begin = begin;
    buffer.end = end;
    buffer.whole = whole;
    return i;
  }
  fprintf(stderr, "fake CUDA: more than %d allocations\n", kBuffers);
  abort();
}

void Universe::access(int actor, int index, uint64_t begin, uint64_t end, bool write,
                      const std::string& what) {
  Buffer& buffer = shared_->buffers[index];
  const Clock& clock = shared_->clocks[actor];
  std::string name = "buffer " + std::to_string(index);
  if (!buffer.live) report_locked("use after free: " + what + " of " + name);
  if (buffer.home != 0 && buffer.home != actor + 1)
    report_locked("race: " + what + " of " + name + ", which the host has let go of");
  if (begin < buffer.begin || end > buffer.end)
    report_locked("out of bounds: " + what + " of bytes " + std::to_string(begin) + " to " +
                  std::to_string(end) + " of " + name + ", which has " +
                  std::to_string(buffer.begin) + " to " + std::to_string(buffer.end));
  uint32_t kept = 0;
  for (uint32_t i = 0; i < buffer.logged; ++i) {
    const Access& old = buffer.log[i];
    bool before =
        clock.at[old.actor] >= old.time || (old.host >= 0 && clock.at[old.host] >= old.host_time);
    bool overlap = old.begin < end && begin < old.end;
    if (overlap && (write || old.write) && !before)
      report_locked("race: " + what + " and " + old.what + " of " + name + " are not ordered");
    // What a later access covers, and is ordered before it, can race with nothing that the later
    // one does not race with.
    bool covered = begin <= old.begin && old.end <= end && (write || !old.write);
    if (before && covered) continue;
    if (kept != i) buffer.log[kept] = old;
    ++kept;
  }
  buffer.logged = kept;
  if (buffer.logged == kLog) {
    report_locked("the log of accesses to " + name + " is full");
    return;
  }
  Access& entry = buffer.log[buffer.logged++];
  entry = {begin, end, static_cast<uint32_t>(actor), clock.at[actor], write, false, -1, 0, {}};
  snprintf(entry.what, sizeof(entry.what), "%s", what.c_str());
}

void Universe::must_be_over(const Clock& known, int index, int pid, const std::string& what) {
  Buffer& buffer = shared_->buffers[index];
  for (uint32_t i = 0; i < buffer.logged; ++i) {
    const Access& old = buffer.log[i];
    if (pid != 0 && shared_->owner[old.actor] != pid) continue;
    if (known.at[old.actor] >= old.time) continue;
    report_locked(what + " of buffer " + std::to_string(index) + " while " + old.what +
                  " may be under way");
  }
}

void Universe::let_go(const Clock& known, int index, int home) {
  Buffer& buffer = shared_->buffers[index];
  for (uint32_t i = 0; i < buffer.logged; ++i) {
    Access& old = buffer.log[i];
    if (old.actor == static_cast<uint32_t>(home)) continue;
    old.over = known.at[old.actor] >= old.time;
    if (!old.over)
      report_locked(std::string("race: ") + old.what +
                    " may be under way when the host lets go of " + "buffer " +
                    std::to_string(index));
  }
  buffer.home = home + 1;
}

void Universe::mark_over(const Clock& known, int index) {
  Buffer& buffer = shared_->buffers[index];
  for (uint32_t i = 0; i < buffer.logged; ++i) {
    Access& old = buffer.log[i];
    if (known.at[old.actor] >= old.time) old.over = true;
  }
}

void Universe::take(int actor, int index) {
  Buffer& buffer = shared_->buffers[index];
  uint32_t time = ++shared_->clocks[actor].at[actor];
  for (uint32_t i = 0; i < buffer.logged; ++i) {
    Access& old = buffer.log[i];
    if (!old.over || old.host >= 0) continue;
    old.host = actor;
    old.host_time = time;
  }
  buffer.home = 0;
}

Flag& Universe::flag(uint64_t file, uint64_t offset) {
  size_t at = (file * 31 + offset / 64) % kFlags;
  for (int tried = 0; tried < kFlags; ++tried, at = (at + 1) % kFlags) {
    Flag& flag = shared_->flags[at];
    if (flag.file == 0) {
      flag.file = file;
      flag.offset = offset;
    }
    if (flag.file == file && flag.offset == offset) return flag;
  }
  fprintf(stderr, "fake CUDA: more than %d flags\n", kFlags);
  abort();
}

}  // namespace fake
