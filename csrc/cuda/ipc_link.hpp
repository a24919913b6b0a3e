/// Links within a host: payloads go from the sender's memory into the receiver's slots by the
/// sender's stream, and two flags a slot order the two ranks' streams.
///
/// A message's header is published after its copy and its `ready` flag have been enqueued, and a
/// slot is let go of on the host after its `free` flag has been. Whoever has seen the host's word
/// may enqueue a wait for the flag: it waits for nothing that is not enqueued yet.
///
/// The flags lie in host memory that both processes map and register with CUDA, so that an abort
/// can write them when no stream of the device gets to run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "board.hpp"
#include "cuda/link.hpp"
#include "cuda/registered.hpp"
#include "cuda/runtime.hpp"
#include "memory.hpp"

namespace zb::cuda {

/// One slot of a link, in memory that both ends share. Each line has one writer.
struct LinkSlot {
  Word ready;                   // messages copied in; by the sender's stream
  alignas(64) Word free;        // messages let go of; by the receiver's stream
  alignas(64) Word generation;  // counts the slot's memories; by the receiver's host
  uint64_t capacity;            // bytes
  uint64_t offset;              // of the slot in the allocation that `handle` names
  IpcHandle handle;
  alignas(64) std::atomic<uint64_t> wanted;  // bytes a message needs; by the sender's host
  Word closed;                               // the last generation that the sender let go of
};

/// The shared words of a link, registered with CUDA in this process.
class LinkWords {
 public:
  LinkWords(std::shared_ptr<const Runtime> runtime, std::shared_ptr<File> file, int slots);

  int fd() const {
    ZB_CHECK(file_ != nullptr, "these words are sealed");
    return file_->fd();
  }
  /// Closes the descriptor; what is mapped stays.
  void seal() { file_.reset(); }
  int slots() const { return slots_; }
  LinkSlot& operator[](int slot) const { return at_[slot]; }
  const Registered& registered() const { return shared_; }

  /// Both ends live in this process; then the slots' memories pass by `memory`, set before their
  /// generation is published, and the words own them too.
  bool local() const { return local_; }
  void make_local();
  std::vector<DeviceMemory> memory;

  /// One end has drained its streams. With the last, everything is given back.
  void leave();

 private:
  std::shared_ptr<File> file_;
  int slots_;
  Registered shared_;
  LinkSlot* at_;
  bool local_ = false;
  std::atomic<int> ends_{1};
};

/// The sender's end: made first, it owns the shared words.
class IpcOut : public OutLink {
 public:
  /// `device` copies; `peer` is the receiving rank, which is rung when it has something to do.
  IpcOut(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int device, int peer,
         int slots);
  /// Leaks what is on the device unless closed: streams may still use it.
  ~IpcOut() override;

  const std::shared_ptr<LinkWords>& words() const { return words_; }
  /// Lets copies go straight to another device of this process where the hardware can.
  void reach(int device);
  bool fits(int slot, size_t bytes) override;
  /// Enqueues: wait for `free`, copy, write `ready`.
  void send(Stream stream, int slot, const Message& message) override;
  void abort() override;
  void collect() override;
  void close() override;
  void seal() override { words_->seal(); }

 private:
  struct Slot {
    std::atomic<uint32_t> sent{0};
    uint32_t generation = 0;
    uint64_t capacity = 0;
    char* data = nullptr;
    void* opened = nullptr;  // what cudaIpcOpenMemHandle gave
    DeviceMemory memory;     // where the receiver is local
  };
  struct Old {
    int slot;
    uint32_t generation;
    void* opened;
    DeviceMemory memory;
  };
  void adopt(int index);
  void set_aside(int index);

  std::shared_ptr<const Runtime> runtime_;
  std::shared_ptr<Board> board_;
  int device_;
  unsigned wait_flags_;
  std::shared_ptr<LinkWords> words_;
  std::vector<Slot> slots_;
  std::vector<Old> outgrown_;
  bool closed_ = false;
};

/// The receiver's end: owns the slots' memory.
class IpcIn : public InLink {
 public:
  /// Over the words of an IpcOut: its own (`words->local()`), or mapped from another process.
  IpcIn(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int device, int peer,
        std::shared_ptr<LinkWords> words, bool poison);
  ~IpcIn() override;

  /// Gives slots the memory that the sender asks for.
  void serve() override;
  /// Enqueues the wait for `ready`.
  void receive(Stream stream, int slot, size_t bytes) override;
  bool held(int slot) const override {
    return slots_.at(slot).released != slots_.at(slot).received;
  }
  void release(Stream stream, int slot) override;
  char* payload(int slot) const override { return slots_.at(slot).memory.get(); }
  void abort() override;
  void collect() override;
  void close() override;
  void seal() override { words_->seal(); }

 private:
  struct Slot {
    std::atomic<uint32_t> received{0};
    uint32_t released = 0;
    uint64_t capacity = 0, bytes = 0;
    DeviceMemory memory;
  };
  struct Old {
    int slot;
    uint32_t generation;
    DeviceMemory memory;
  };
  void grow(int index, size_t bytes);
  bool given_back(const Old& old) const;

  std::shared_ptr<const Runtime> runtime_;
  std::shared_ptr<Board> board_;
  int device_;
  unsigned wait_flags_;
  std::shared_ptr<LinkWords> words_;
  bool poison_;
  std::vector<Slot> slots_;
  std::vector<Old> outgrown_;
  bool closed_ = false;
};

}  // namespace zb::cuda
