// Several products as one section of a team: small ones are not shared out one by one, among cores that wait.

#pragma once

#include <optional>
#include <vector>

#include "elementwise.h"
#include "matrix.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// Some products of rows with matrices of one size that lie one after the other. Numbers: InNumbers, or In8Bits of experts.h.
template <class Numbers>
class ProductsOfRuns {
    using Left = typename Numbers::Left;
    using Matrix = typename Numbers::Matrix;

  public:
    void add(const Target<Number>& out, const Left& left, const Matrix& matrix, int num_threads) {
        const Shares shares(Numbers::num_rows(left), Numbers::parts_of(left, matrix), out.num_out, num_threads);
        products_.push_back({out, left, matrix, shares, num_shares_});
        num_shares_ += shares.count;
    }

    template <bool IS_GATED>
    void run(Team& team) const {
        Numbers::template choose_shares<IS_GATED>([&](auto shares) { run_by<typename decltype(shares)::Type>(team); });
    }

  private:
    struct Product {
        Target<Number> out;
        Left left;
        Matrix matrix;
        Shares shares;
        int64_t first_share;
    };

    template <class MultiplyShare>
    void run_by(Team& team) const {
        std::optional<MultiplyShare> multiply;  // of the product that this thread is at
        const Product* at = nullptr;
        team.for_each(num_shares_, [&](int64_t item) {
            const Product& product = product_of(item);
            if (&product != at) multiply.emplace(product.out, product.left, product.matrix);
            at = &product;
            (*multiply)(product.shares.share(item - product.first_share), panel_after(product, item + team.size()));
        });
    }

    const Product& product_of(int64_t item) const {
        const auto is_before = [](int64_t item, const Product& product) { return item < product.first_share; };
        return *(std::upper_bound(products_.begin(), products_.end(), item, is_before) - 1);
    }

    // Where a share begins, as a panel of this product's matrix; the others' lie in one row with it.
    int64_t panel_after(const Product& product, int64_t item) const {
        const Product& next = product_of(std::min(item, num_shares_ - 1));
        return (next.matrix.values - product.matrix.values) / Numbers::panel_size(product.matrix) + next.shares.begin(item - next.first_share);
    }

    std::vector<Product> products_;
    int64_t num_shares_ = 0;
};

template <class T>
struct TypeOf {
    using Type = T;
};

struct InNumbers {
    using Left = LeftRows;
    using Matrix = PackedMatrix;

    static int num_rows(const Left& left) { return left.count; }
    static Parts parts_of(const Left& left, const Matrix& matrix) { return weft::parts_of(left, matrix.num_in); }
    static int64_t panel_size(const Matrix& matrix) { return int64_t(PANEL) * matrix.num_in; }

    template <bool IS_GATED, class Work>
    static void choose_shares(const Work& work) {
#ifdef WEFT_HAS_AMX
        if (may_use_tiles()) return work(TypeOf<SharesByTiles<IS_GATED, Target<Number>>>{});
#endif
        work(TypeOf<SharesByVectors<IS_GATED, Target<Number>>>{});
    }
};

// A matrix for each head, one after the other, and what it makes of the head's vector of each token. Sizes are multiples of PANEL.
class ProductsOfHeads {
  public:
    static constexpr int SECTIONS = 2;

    // Numbers of scratch memory.
    static int64_t scratch_size(int64_t num_tokens, int64_t num_heads, int num_in) { return num_heads * weft::scratch_size(num_tokens, num_in); }

    ProductsOfHeads(const Heads<Number>& out, const Heads<Number>& x, int num_tokens, int num_heads, const PackedMatrix& first, Number* scratch, int num_threads)
        : num_heads_(num_tokens ? num_heads : 0), num_in_(first.num_in), is_packed_(needs_packing(num_tokens)), packed_size_(weft::scratch_size(num_tokens, num_in_)),
          packed_(scratch) {
        for (int head = 0; head < num_heads_; head++) {
            const LeftRows& rows = rows_.emplace_back(LeftRows{x.at(0, head), x.token_stride, num_tokens});
            const LeftRows left = is_packed_ ? LeftRows{packed_ + head * packed_size_, num_in_, num_tokens, true} : rows;
            const PackedMatrix matrix{first.values + head * first.num_out * num_in_, nullptr, first.num_out, num_in_};
            products_.add({out.at(0, head), first.num_out, false, 0, 0, out.token_stride}, left, matrix, num_threads);
        }
    }

    void run(Team& team) const {
        if (is_packed_) {
            const int64_t tiles = num_tiles(rows_[0].count);
            team.for_each(num_heads_ * tiles, [=](int64_t item) {
                const int64_t head = item / tiles;
                pack_tile(packed_ + head * packed_size_, rows_[size_t(head)], num_in_, item % tiles);
            });
        }
        products_.run<false>(team);
    }

  private:
    const int num_heads_, num_in_;
    const bool is_packed_;
    const int64_t packed_size_;
    Number* const packed_;
    std::vector<LeftRows> rows_;  // of each head
    ProductsOfRuns<InNumbers> products_;
};

}  // namespace weft

#endif
