//! MT19937, the generator behind `torch.Generator` on the CPU.
//!
//! Matsumoto and Nishimura, "Mersenne Twister: a 623-dimensionally equidistributed uniform pseudo-random number generator" (1998), with
//! their 2002 seeding.

const N: usize = 624;
const M: usize = 397;

pub(crate) struct MersenneTwister {
    state: [u32; N],
    next: usize,
}

impl MersenneTwister {
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let previous = state[i - 1];
            state[i] = (previous ^ (previous >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { state, next: N }
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::MersenneTwister;

    /// The values that the C++ standard gives for `std::mt19937` of its default seed: the first, and the 10000th.
    #[test]
    fn known_outputs() {
        let mut draws = MersenneTwister::new(5489);
        assert_eq!(draws.next_u32(), 3_499_211_612);
        assert_eq!((0..9999).map(|_| draws.next_u32()).last(), Some(4_123_659_995));
    }
}
