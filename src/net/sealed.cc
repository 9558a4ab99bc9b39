#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "weft/net.h"

namespace weft::net {
namespace {

constexpr size_t kRecordBytes = 64u << 10;  // of plaintext, at most
constexpr size_t kLength = 4;
constexpr size_t kProof = 16;
constexpr size_t kLeastRead = 4096;
// A key is used for 64 GiB at the most: well below what AES-GCM can prove and hide.
constexpr uint64_t kRecordsOfAKey = 1u << 20;

using Key = Seal::Key;

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}
std::span<const std::byte> bytes_of(std::string_view words) {
  return std::as_bytes(std::span(words));
}

Key hmac(std::span<const std::byte> key, std::span<const std::span<const std::byte>> parts) {
  std::vector<std::byte> message;
  for (std::span<const std::byte> part : parts)
    message.insert(message.end(), part.begin(), part.end());
  Key out{};
  unsigned int length = 0;
  // The only thing that it can lack is memory.
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), raw(message.data()),
           message.size(), raw(out.data()), &length) == nullptr)
    throw std::bad_alloc();
  WEFT_CHECK(length == out.size());
  return out;
}

// HKDF-SHA256 (RFC 5869), of which one block is a key.
Key expand(const Key& from, std::span<const std::byte> label, std::span<const std::byte> context) {
  constexpr std::byte kFirstBlock{1};
  const std::span<const std::byte> parts[] = {label, context, std::span(&kFirstBlock, 1)};
  return hmac(from, parts);
}

// One direction: a key, a count of records, and the cipher that both are in.
class Direction {
 public:
  Direction(const Key& key, uint64_t count, bool encrypts)
      : key_(key), count_(count), encrypts_(encrypts), cipher_(EVP_CIPHER_CTX_new()) {
    // Here it gets all the memory that it needs, or none.
    if (cipher_ == nullptr ||
        EVP_CipherInit_ex(cipher_, EVP_aes_256_gcm(), nullptr, raw(key_.data()), nullptr,
                          encrypts_ ? 1 : 0) != 1) {
      EVP_CIPHER_CTX_free(cipher_);
      throw std::bad_alloc();
    }
  }
  ~Direction() {
    EVP_CIPHER_CTX_free(cipher_);
    OPENSSL_cleanse(key_.data(), key_.size());
  }
  Direction(const Direction&) = delete;
  Direction& operator=(const Direction&) = delete;

  // The next record begins: its number is its nonce, its length is proved with it.
  void begin(std::span<const std::byte, kLength> length) {
    unsigned char nonce[12] = {};
    std::memcpy(nonce + 4, &count_, sizeof count_);
    WEFT_CHECK(EVP_CipherInit_ex(cipher_, nullptr, nullptr, nullptr, nonce, encrypts_ ? 1 : 0) ==
               1);
    int done = 0;
    WEFT_CHECK(EVP_CipherUpdate(cipher_, nullptr, &done, raw(length.data()),
                                static_cast<int>(length.size())) == 1);
  }
  void update(const std::byte* from, std::byte* to, size_t size) {
    int done = 0;
    WEFT_CHECK(EVP_CipherUpdate(cipher_, raw(to), &done, raw(from), static_cast<int>(size)) == 1);
    WEFT_CHECK(static_cast<size_t>(done) == size);
  }
  void prove(std::byte* proof) {
    unsigned char none[16];
    int done = 0;
    WEFT_CHECK(EVP_CipherFinal_ex(cipher_, none, &done) == 1);
    WEFT_CHECK(EVP_CIPHER_CTX_ctrl(cipher_, EVP_CTRL_GCM_GET_TAG, kProof, raw(proof)) == 1);
    next();
  }
  bool is_proved_by(std::byte* proof) {
    unsigned char none[16];
    int done = 0;
    WEFT_CHECK(EVP_CIPHER_CTX_ctrl(cipher_, EVP_CTRL_GCM_SET_TAG, kProof, raw(proof)) == 1);
    if (EVP_CipherFinal_ex(cipher_, none, &done) != 1) return false;
    next();
    return true;
  }
  const Key& key() const { return key_; }
  uint64_t count() const { return count_; }

 private:
  void next() {
    if (++count_ % kRecordsOfAKey != 0) return;
    key_ = expand(key_, bytes_of("weft next key"), {});
    WEFT_CHECK(EVP_CipherInit_ex(cipher_, nullptr, nullptr, raw(key_.data()), nullptr,
                                 encrypts_ ? 1 : 0) == 1);
  }

  Key key_;
  uint64_t count_;
  bool encrypts_;
  EVP_CIPHER_CTX* cipher_;
};

class SealedSocket final : public Socket {
 public:
  SealedSocket(std::unique_ptr<Socket> inner, const Seal& keys)
      : inner_(std::move(inner)),
        out_(keys.send, keys.sent, true),
        in_(keys.receive, keys.received, false) {}

  // A record that the connection did not take whole is kept, and its bytes count as sent when the
  // rest of it is gone: so nothing of what was told as sent waits in here.
  ssize_t send(const iovec* parts, size_t count) override {
    size_t taken = 0, part = 0, in_part = 0;  // of the caller's
    for (;;) {
      if (record_sent_ == record_size_) {
        if (!fill_record(parts, count, part, in_part)) break;
      } else if (taken == 0) {
        skip(parts, count, part, in_part, record_of_);
      }
      iovec rest{record_.data() + record_sent_, record_size_ - record_sent_};
      ssize_t put = inner_->send(&rest, 1);
      if (put < 0) return taken > 0 ? static_cast<ssize_t>(taken) : put;
      record_sent_ += static_cast<size_t>(put);
      if (record_sent_ < record_size_) return taken > 0 ? static_cast<ssize_t>(taken) : -EAGAIN;
      taken += record_of_;
    }
    return static_cast<ssize_t>(taken);
  }

  ssize_t receive(const iovec* parts, size_t count) override {
    size_t given = 0;
    bool drained = false;
    for (size_t part = 0, in_part = 0; part < count;) {
      if (parts[part].iov_len == in_part) {
        ++part;
        in_part = 0;
      } else if (plain_ > 0) {
        size_t here = std::min(plain_, parts[part].iov_len - in_part);
        std::memcpy(static_cast<std::byte*>(parts[part].iov_base) + in_part, input_.data() + begin_,
                    here);
        given += here;
        in_part += here;
        plain_ -= here;
        begin_ += here + (plain_ == 0 ? kProof : 0);
      } else if (!problem_.empty()) {
        return given > 0 ? static_cast<ssize_t>(given) : -EBADMSG;
      } else if (has_whole_record()) {
        open_record();
      } else if (drained) {
        break;
      } else {
        ssize_t got = read_more(drained);
        if (got > 0) continue;
        if (given > 0) break;  // the end, or the error, comes again
        // Whoever sent it was ended in the middle of a word, or cut off: it is broken, not ended.
        if (got == 0 && end_ > begin_) {
          problem_ = text("the connection ended inside record %llu: it was cut off on the way",
                          static_cast<unsigned long long>(in_.count()));
          return -ECONNRESET;
        }
        return got;
      }
    }
    return given > 0 || !drained ? static_cast<ssize_t>(given) : -EAGAIN;
  }

  std::string problem() const override { return problem_; }
  bool sealed() const override { return true; }
  std::optional<Seal> hand_over() override {
    WEFT_CHECK(begin_ == end_ && record_sent_ == record_size_);
    inner_->hand_over();
    return Seal{out_.key(), in_.key(), out_.count(), in_.count()};
  }
  bool in_memory() const override { return true; }
  uint32_t memory_events(uint32_t events, bool) override {
    bool waits = plain_ > 0 || !problem_.empty() || has_whole_record();
    return (events & EPOLLIN) != 0 && waits ? static_cast<uint32_t>(EPOLLIN) : 0u;
  }

  int connect_outcome() override { return inner_->connect_outcome(); }
  std::string local_host() const override { return inner_->local_host(); }
  uint16_t local_port() const override { return inner_->local_port(); }
  std::string peer() const override { return inner_->peer(); }
  void limit_unsent(uint32_t bytes) override { inner_->limit_unsent(bytes); }
  void limit_rate(double bytes_per_s) override { inner_->limit_rate(bytes_per_s); }
  std::optional<TcpInfo> tcp_info() const override { return inner_->tcp_info(); }
  int fd() const override { return inner_->fd(); }
  Socket& carrier() override { return inner_->carrier(); }
  void shut() override { inner_->shut(); }
  bool inside_machine() const override { return inner_->inside_machine(); }

 private:
  // Seals the next bytes of the caller's. False when there are none.
  bool fill_record(const iovec* parts, size_t count, size_t& part, size_t& in_part) {
    size_t size = 0;
    for (size_t i = part; i < count && size < kRecordBytes; ++i)
      size += parts[i].iov_len - (i == part ? in_part : 0);
    size = std::min(size, kRecordBytes);
    if (size == 0) return false;
    record_size_ = kLength + size + kProof;
    if (record_.size() < record_size_) record_.resize(record_size_);  // never shrunk
    auto length = static_cast<uint32_t>(size);
    std::memcpy(record_.data(), &length, kLength);
    out_.begin(std::span(record_).first<kLength>());
    std::byte* to = record_.data() + kLength;
    for (size_t left = size; left > 0;) {
      size_t here = std::min(left, parts[part].iov_len - in_part);
      if (here > 0)
        out_.update(static_cast<const std::byte*>(parts[part].iov_base) + in_part, to, here);
      to += here;
      left -= here;
      in_part += here;
      if (in_part == parts[part].iov_len && left > 0) {
        ++part;
        in_part = 0;
      }
    }
    out_.prove(to);
    record_of_ = size;
    record_sent_ = 0;
    return true;
  }

  // What is offered again and is in the record already.
  static void skip(const iovec* parts, size_t count, size_t& part, size_t& in_part, size_t size) {
    while (size > 0) {
      WEFT_CHECK(part < count);  // it is offered again: Socket::send
      size_t here = std::min(size, parts[part].iov_len - in_part);
      size -= here;
      in_part += here;
      if (in_part == parts[part].iov_len && size > 0) {
        ++part;
        in_part = 0;
      }
    }
  }

  uint32_t next_length() const {
    uint32_t length;
    std::memcpy(&length, input_.data() + begin_, kLength);
    return length;
  }
  bool has_whole_record() const {
    if (end_ - begin_ < kLength) return false;
    // One that is too long is not waited for.
    size_t length = next_length();
    return length == 0 || length > kRecordBytes || end_ - begin_ >= kLength + length + kProof;
  }

  // Bytes are given to nobody before they are proved.
  void open_record() {
    size_t length = next_length();
    auto number = static_cast<unsigned long long>(in_.count());
    if (length == 0 || length > kRecordBytes) {
      problem_ = text(
          "record %llu of a sealed connection claims %zu bytes; 1 to %zu are possible: "
          "it was changed on the way",
          number, length, kRecordBytes);
      return;
    }
    in_.begin(std::span(input_).subspan(begin_).first<kLength>());
    begin_ += kLength;
    in_.update(input_.data() + begin_, input_.data() + begin_, length);
    if (in_.is_proved_by(input_.data() + begin_ + length))
      plain_ = length;
    else
      problem_ = text(
          "record %llu of a sealed connection does not prove itself: it was changed, "
          "repeated, moved or left out on the way",
          number);
  }

  // Up to the end of the record that has begun and the length of the next one: so large records are
  // never moved, and many small ones come with one call.
  ssize_t read_more(bool& drained) {
    size_t have = end_ - begin_;
    if (begin_ > 0) std::memmove(input_.data(), input_.data() + begin_, have);
    begin_ = 0;
    end_ = have;
    size_t whole = have < kLength ? 0 : kLength + next_length() + kProof;
    size_t asked = std::max(kLeastRead, whole + kLength - std::min(have, whole));
    if (input_.size() < have + asked) input_.resize(have + asked);
    iovec rest{input_.data() + end_, asked};
    ssize_t got = inner_->receive(&rest, 1);
    if (got <= 0) return got;
    end_ += static_cast<size_t>(got);
    drained = static_cast<size_t>(got) < asked;
    return got;
  }

  std::unique_ptr<Socket> inner_;
  Direction out_, in_;
  // Going out: the record on its way, and how many bytes of the caller's are in it.
  std::vector<std::byte> record_;
  size_t record_size_ = 0;
  size_t record_sent_ = 0;
  size_t record_of_ = 0;
  // Coming in: [begin_, end_), of which the first plain_ bytes are opened.
  std::vector<std::byte> input_;
  size_t begin_ = 0, end_ = 0, plain_ = 0;
  std::string problem_;
};

}  // namespace

Seal derive_seal(std::string_view secret, std::span<const std::byte> connector_nonce,
                 std::span<const std::byte> acceptor_nonce, std::span<const std::byte> context,
                 bool connector) {
  std::vector<std::byte> salt(connector_nonce.begin(), connector_nonce.end());
  salt.insert(salt.end(), acceptor_nonce.begin(), acceptor_nonce.end());
  const std::span<const std::byte> material[] = {bytes_of(secret)};
  Key extracted = hmac(salt, material);
  Key out = expand(extracted, bytes_of("weft seal of the connector"), context);
  Key in = expand(extracted, bytes_of("weft seal of the acceptor"), context);
  OPENSSL_cleanse(extracted.data(), extracted.size());
  if (!connector) std::swap(out, in);
  return {out, in, 0, 0};
}

std::unique_ptr<Socket> seal(std::unique_ptr<Socket> inner, const Seal& keys) {
  return std::make_unique<SealedSocket>(std::move(inner), keys);
}

}  // namespace weft::net
