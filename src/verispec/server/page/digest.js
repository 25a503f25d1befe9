// The digest of an answer, from its streamed tokens: SHA-256 over the ids as int32 and then the log-probabilities as
// float32, little-endian. Own code, because browsers have crypto.subtle on https and on this machine's address only.

const primes = [];
for (let n = 2; primes.length < 64; n += 1) if (primes.every((p) => n % p)) primes.push(n);
const fraction = (x) => ((x - Math.floor(x)) * 2 ** 32) | 0;
const ROUNDS = primes.map((p) => fraction(Math.cbrt(p)));
const START = primes.slice(0, 8).map((p) => fraction(Math.sqrt(p)));
const turned = (x, n) => (x >>> n) | (x << (32 - n));

export function digestOf(ids, logprobs) {
  const nbytes = 8 * ids.length;
  const data = new DataView(new ArrayBuffer(64 * Math.ceil((nbytes + 9) / 64)));
  ids.forEach((id, i) => data.setInt32(4 * i, id, true));
  logprobs.forEach((value, i) => data.setFloat32(4 * (ids.length + i), value, true));
  data.setUint8(nbytes, 0x80);
  data.setUint32(data.byteLength - 4, 8 * nbytes);
  return sha256(data);
}

// Of blocks that are padded already.
function sha256(data) {
  const state = [...START];
  const words = new Int32Array(64);
  for (let at = 0; at < data.byteLength; at += 64) {
    for (let i = 0; i < 64; i += 1) {
      if (i < 16) { words[i] = data.getInt32(at + 4 * i); continue; }
      const [x, y] = [words[i - 15], words[i - 2]];
      words[i] = words[i - 16] + (turned(x, 7) ^ turned(x, 18) ^ (x >>> 3))
        + words[i - 7] + (turned(y, 17) ^ turned(y, 19) ^ (y >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i += 1) {
      const first = (h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + ROUNDS[i] + words[i]) | 0;
      const second = ((turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((value, i) => { state[i] = (state[i] + value) | 0; });
  }
  return state.map((word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}
