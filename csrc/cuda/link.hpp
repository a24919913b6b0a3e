/// The device's half of a channel: payloads go from the sender's memory into the receiver's slots
/// by the sender's stream, and two flags a slot order the two ranks' streams.
///
/// The host's half (transport/channel.hpp) carries the headers, and with them the knowledge of what
/// has been enqueued: a message's header is published after its copy and its `ready` flag have been
/// enqueued, and a slot is let go of on the host after its `free` flag has been. Whoever has seen
/// the host's word may enqueue a wait for the flag: it waits for nothing that is not enqueued yet.
///
/// The flags lie in host memory that both processes map and register with CUDA, so that an abort
/// can write them when no stream of the device gets to run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "board.hpp"
#include "cuda/runtime.hpp"
#include "memory.hpp"
#include "transport/channel.hpp"

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

/// A slot's memory on the receiver's device; freed with the last owner.
using DeviceMemory = std::shared_ptr<char>;
/// `bytes` on `device`.
DeviceMemory allocate(const std::shared_ptr<const Runtime>& runtime, int device, size_t bytes);

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
  /// Where the device finds a word of this memory.
  uint64_t device(const Word& word) const;

  /// Both ends live in this process; then the slots' memories pass by `memory`, set before their
  /// generation is published, and the words own them too.
  bool local() const { return local_; }
  void make_local();
  std::vector<DeviceMemory> memory;

  /// One end has drained its streams. With the last, everything is given back.
  void leave();

 private:
  std::shared_ptr<const Runtime> runtime_;
  std::shared_ptr<File> file_;
  int slots_;
  Mapping map_;
  LinkSlot* at_;
  uint64_t device_ = 0;
  bool local_ = false;
  std::atomic<int> ends_{1};
};

/// The sender's end: made first, it owns the shared words.
class OutLink {
 public:
  /// `device` copies; `peer` is the receiving rank, which is rung when it has something to do.
  OutLink(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int device,
          int peer, int slots);
  /// Leaks what is on the device unless closed: streams may still use it.
  ~OutLink();
  OutLink(const OutLink&) = delete;
  OutLink& operator=(const OutLink&) = delete;

  const std::shared_ptr<LinkWords>& words() const { return words_; }
  int slots() const { return words_->slots(); }
  int peer() const { return peer_; }
  /// Lets copies go straight to another device of this process where the hardware can.
  void reach(int device);
  /// True when the slot's memory takes `bytes`. Otherwise asks the receiver for more, and is to be
  /// called again. Only while nothing of the slot is in use: its last message was let go of.
  bool fits(int slot, size_t bytes);
  /// Enqueues the next message of `slot`: wait for `free`, copy, write `ready`. It must fit.
  void send(Stream stream, int slot, const Message& message);
  /// Lets go on the host what a stream may wait for here; call until the streams have drained. From
  /// any thread.
  void abort();
  /// Lets go of memory that was outgrown; only when the streams have drained.
  void collect();
  void close();

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
  int device_, peer_;
  unsigned wait_flags_;
  std::shared_ptr<LinkWords> words_;
  std::vector<Slot> slots_;
  std::vector<Old> outgrown_;
  bool closed_ = false;
};

/// The receiver's end: owns the slots' memory.
class InLink {
 public:
  /// Over the words of an OutLink: its own (`words->local()`), or mapped from another process.
  InLink(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int device, int peer,
         std::shared_ptr<LinkWords> words, bool poison);
  ~InLink();
  InLink(const InLink&) = delete;
  InLink& operator=(const InLink&) = delete;

  const std::shared_ptr<LinkWords>& words() const { return words_; }
  int slots() const { return words_->slots(); }
  int peer() const { return peer_; }
  /// Gives slots the memory that the sender asks for.
  void serve();
  /// Enqueues the wait for the next message of `slot`, of `bytes`.
  void receive(Stream stream, int slot, size_t bytes);
  /// True while the slot holds a message that was not let go of.
  bool held(int slot) const { return slots_.at(slot).released != slots_.at(slot).received; }
  /// Enqueues that the message in `slot` is let go of. What reads it must be before, in `stream`.
  void release(Stream stream, int slot);
  char* payload(int slot) const { return slots_.at(slot).memory.get(); }
  /// As of OutLink.
  void abort();
  void collect();
  void close();

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
  int device_, peer_;
  unsigned wait_flags_;
  std::shared_ptr<LinkWords> words_;
  bool poison_;
  std::vector<Slot> slots_;
  std::vector<Old> outgrown_;
  bool closed_ = false;
};

}  // namespace zb::cuda
