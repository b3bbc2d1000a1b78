//! The mean in rank order: numbers by hand, and every variant against the oracle at every length,
//! offset and number of inputs.

use std::num::NonZeroU32;

use crate::common::{assert_same, bytes_of, Numbers, Placed};
use gradlane_codec::{
    reduce_mean, reduce_mean_slices, reduce_mean_with, Buffer, FloatDtype, InstructionSet, Mean,
    ReduceError,
};

fn mean(dtype: FloatDtype, divisor: u32, add_zero: bool) -> Mean {
    Mean { dtype, divisor: NonZeroU32::new(divisor).unwrap(), add_zero }
}

fn reduced(instruction_set: InstructionSet, mean: Mean, inputs: &[&[u8]]) -> Vec<u8> {
    let mut output = vec![0x77; inputs[0].len()];
    reduce_mean_slices(instruction_set, mean, inputs, &mut output, None).unwrap();
    output
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn f16s(bits: &[u16]) -> Vec<u8> {
    bits.iter().flat_map(|one| one.to_ne_bytes()).collect()
}

#[test]
fn sums_go_in_rank_order_and_are_divided() {
    // 1e8 + 1 is 1e8 in f32: the order decides whether the one survives.
    let (big, one, minus) = (f32s(&[1e8; 40]), f32s(&[1.0; 40]), f32s(&[-1e8; 40]));
    for instruction_set in InstructionSet::available() {
        let three = mean(FloatDtype::F32, 3, false);
        assert_eq!(
            reduced(instruction_set, three, &[&big, &one, &minus]),
            f32s(&[0.0; 40]),
            "{instruction_set}"
        );
        assert_eq!(
            reduced(instruction_set, three, &[&big, &minus, &one]),
            f32s(&[f32::from_bits(0x3eaa_aaab); 40]),
            "{instruction_set}"
        );
    }
}

#[test]
fn a_mean_is_a_quotient_and_no_product_with_a_reciprocal() {
    // 5 / 49 and 5 * (1 / 49) are neighbours in f32.
    assert_ne!(5.0_f32 / 49.0, 5.0_f32 * (1.0 / 49.0));
    let inputs = [f32s(&[2.0; 40]), f32s(&[3.0; 40])];
    for instruction_set in InstructionSet::available() {
        let found =
            reduced(instruction_set, mean(FloatDtype::F32, 49, false), &[&inputs[0], &inputs[1]]);
        assert_eq!(found, f32s(&[5.0 / 49.0; 40]), "{instruction_set}");
    }
}

#[test]
fn halves_are_summed_in_f32_and_rounded_once_to_even() {
    // 2048 + 1 + 1: in f16 each one would be lost, in f32 none is. The mean over 2 is 1025.
    // 2049 lies between 2048 and 2050 in f16 and goes to the even mantissa, as 2051 goes to 2052.
    let f16 = |value: f32| f16s(&[half::f16::from_f32(value).to_bits(); 20]);
    // 256 + 1 lies between 256 and 258 in bf16, 259 between 258 and 260.
    let bf16 = |value: f32| f16s(&[half::bf16::from_f32(value).to_bits(); 20]);
    for instruction_set in InstructionSet::available() {
        let two = mean(FloatDtype::F16, 2, false);
        let one = mean(FloatDtype::F16, 1, false);
        assert_eq!(
            reduced(instruction_set, two, &[&f16(2048.0), &f16(1.0), &f16(1.0)]),
            f16(1025.0)
        );
        assert_eq!(
            reduced(instruction_set, one, &[&f16(2048.0), &f16(1.0)]),
            f16(2048.0),
            "{instruction_set}"
        );
        assert_eq!(
            reduced(instruction_set, one, &[&f16(2050.0), &f16(1.0)]),
            f16(2052.0),
            "{instruction_set}"
        );
        let one = mean(FloatDtype::Bf16, 1, false);
        assert_eq!(
            reduced(instruction_set, one, &[&bf16(256.0), &bf16(1.0)]),
            bf16(256.0),
            "{instruction_set}"
        );
        assert_eq!(
            reduced(instruction_set, one, &[&bf16(258.0), &bf16(1.0)]),
            bf16(260.0),
            "{instruction_set}"
        );
    }
}

#[test]
fn subnormal_results_are_kept() {
    let tiny = f32s(&[f32::from_bits(3); 20]);
    for instruction_set in InstructionSet::available() {
        // 3 / 2 subnormal units round to 2, 6 / 4 too; 3 / 3 is one unit.
        let halved = reduced(instruction_set, mean(FloatDtype::F32, 2, false), &[&tiny]);
        assert_eq!(halved, f32s(&[f32::from_bits(2); 20]), "{instruction_set}");
        let quartered = reduced(instruction_set, mean(FloatDtype::F32, 4, false), &[&tiny, &tiny]);
        assert_eq!(quartered, f32s(&[f32::from_bits(2); 20]), "{instruction_set}");
        let third = reduced(instruction_set, mean(FloatDtype::F32, 3, false), &[&tiny]);
        assert_eq!(third, f32s(&[f32::from_bits(1); 20]), "{instruction_set}");
    }
}

#[test]
fn a_single_contribution_is_copied_with_its_nan_payload() {
    for dtype in FloatDtype::ALL {
        let input = Numbers(7).elements(dtype, 1000);
        for instruction_set in InstructionSet::available() {
            let mut second = vec![0; input.len()];
            let mut output = vec![0; input.len()];
            let only = mean(dtype, 1, false);
            reduce_mean_slices(instruction_set, only, &[&input], &mut output, Some(&mut second))
                .unwrap();
            assert!(output == input && second == input, "{dtype} {instruction_set}");
        }
    }
}

#[test]
fn an_added_zero_turns_minus_zero_into_plus_zero_and_nothing_else() {
    for dtype in FloatDtype::ALL {
        let inputs: Vec<_> = (0..3).map(|seed| Numbers(seed).elements(dtype, 3000)).collect();
        let zeros = vec![0; inputs[0].len()];
        let minus = bytes_of(dtype, -0.0).repeat(20);
        for instruction_set in InstructionSet::available() {
            for divisor in [1, 4, 5] {
                let add = mean(dtype, divisor, true);
                let explicit = mean(dtype, divisor, false);
                let expected = reduced(
                    instruction_set,
                    explicit,
                    &[&inputs[0], &inputs[1], &zeros, &inputs[2]],
                );
                let found = reduced(instruction_set, add, &[&inputs[0], &inputs[1], &inputs[2]]);
                assert_same(dtype, &found, &expected, &|| {
                    format!("{dtype} {instruction_set} /{divisor}")
                });
                assert_eq!(reduced(instruction_set, add, &[&minus, &minus]), zeros[..minus.len()]);
                assert_eq!(reduced(instruction_set, explicit, &[&minus, &minus]), minus);
            }
        }
    }
}

#[test]
fn no_contribution_gives_zeros() {
    for dtype in FloatDtype::ALL {
        for instruction_set in InstructionSet::available() {
            let mut output = vec![0x77; 50 * dtype.element_bytes()];
            reduce_mean_slices(instruction_set, mean(dtype, 4, true), &[], &mut output, None)
                .unwrap();
            assert!(output.iter().all(|byte| *byte == 0), "{dtype} {instruction_set}");
        }
    }
}

#[test]
fn nan_and_infinity_come_through() {
    let inputs = [f32s(&[f32::INFINITY; 20]), f32s(&[f32::NEG_INFINITY; 20]), f32s(&[1.0; 20])];
    for instruction_set in InstructionSet::available() {
        for divisor in [2, 3] {
            let by = mean(FloatDtype::F32, divisor, false);
            let infinite = reduced(instruction_set, by, &[&inputs[0], &inputs[2]]);
            assert_eq!(infinite, inputs[0], "{instruction_set}");
            let undefined = reduced(instruction_set, by, &[&inputs[0], &inputs[1], &inputs[2]]);
            assert!(undefined
                .chunks_exact(4)
                .all(|one| f32::from_ne_bytes(one.try_into().unwrap()).is_nan()));
        }
    }
}

/// Compares all variants with the oracle for one shape, with both outputs and in place.
fn check_shape(dtype: FloatDtype, length: usize, inputs: usize, offset: usize) {
    let seed = (length * 64 + inputs * 8 + offset) as u64;
    let mut numbers = Numbers(seed);
    let bytes = length * dtype.element_bytes();
    let placed: Vec<Placed> = (0..inputs)
        .map(|index| Placed::holding(&numbers.elements(dtype, length), offset + index * 3))
        .collect();
    let contents: Vec<&[u8]> = placed.iter().map(Placed::as_ref).collect();
    // Every shape sees a power of two and another divisor, with and without an added zero.
    let divisor = u32::try_from(inputs + (length + offset) % 3).unwrap();
    let how = mean(dtype, divisor, length.is_multiple_of(5));
    let expected = reduced(InstructionSet::SCALAR, how, &contents);
    for instruction_set in InstructionSet::available() {
        let what =
            || format!("{dtype} {instruction_set} {length} elements, {inputs} inputs, +{offset}");
        let mut output = Placed::room(bytes, offset + 1);
        let mut second = Placed::room(bytes, offset + 2);
        let copy_to = Some(second.as_mut());
        reduce_mean_slices(instruction_set, how, &contents, output.as_mut(), copy_to).unwrap();
        assert_same(dtype, output.as_ref(), &expected, &what);
        assert_eq!(output.as_ref(), second.as_ref(), "{}", what());
        output.assert_guards();
        second.assert_guards();

        let target = length % inputs;
        let mut in_place = placed[target].clone();
        let target_pointer = in_place.as_mut().as_mut_ptr();
        let mut pointers: Vec<*const u8> = contents.iter().map(|one| one.as_ptr()).collect();
        pointers[target] = target_pointer;
        // SAFETY: all buffers have `length` elements; the output is exactly one of the inputs.
        unsafe { reduce_mean_with(instruction_set, how, &pointers, target_pointer, None, length) };
        assert_same(dtype, in_place.as_ref(), &expected, &what);
        in_place.assert_guards();
    }
}

#[test]
fn every_length_and_number_of_inputs_gives_the_bits_of_the_oracle() {
    for dtype in FloatDtype::ALL {
        for length in 0..=300 {
            for inputs in 1..=8 {
                check_shape(dtype, length, inputs, (length + inputs) % 8);
            }
        }
    }
}

#[test]
fn every_byte_offset_gives_the_bits_of_the_oracle() {
    for dtype in FloatDtype::ALL {
        for offset in 0..16 {
            for length in [1, 3, 7, 8, 15, 16, 31, 33, 63, 64, 65, 127, 130, 299] {
                check_shape(dtype, length, 1 + offset % 4, offset);
            }
        }
    }
}

#[test]
fn the_second_output_may_be_an_input_and_the_active_variant_agrees() {
    for dtype in FloatDtype::ALL {
        let length = 211;
        let mut numbers = Numbers(3);
        let inputs: Vec<_> = (0..3).map(|_| numbers.elements(dtype, length)).collect();
        let contents: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let how = mean(dtype, 3, false);
        let expected = reduced(InstructionSet::SCALAR, how, &contents);
        let mut output = vec![0; expected.len()];
        let mut second = inputs[1].clone();
        let second_pointer = second.as_mut_ptr();
        let pointers = [inputs[0].as_ptr(), second_pointer.cast_const(), inputs[2].as_ptr()];
        // SAFETY: all buffers have `length` elements; the second output is exactly one input.
        unsafe {
            reduce_mean(how, &pointers, output.as_mut_ptr(), Some(second_pointer), length);
        }
        assert_same(dtype, &output, &expected, &|| format!("{dtype}"));
        assert_eq!(output, second);

        // In place with a second output beside it, and the copy of a single input onto itself.
        let mut alone = inputs[0].clone();
        let alone_pointer = alone.as_mut_ptr();
        // SAFETY: all buffers have `length` elements; the output is exactly the input.
        unsafe {
            let only = mean(dtype, 1, false);
            let second_pointer = Some(second.as_mut_ptr());
            reduce_mean(only, &[alone_pointer.cast_const()], alone_pointer, second_pointer, length);
        }
        assert!(alone == inputs[0] && second == inputs[0], "{dtype}");
    }
}

#[test]
fn buffers_that_do_not_fit_are_refused_untouched() {
    let (short, long) = (vec![1_u8; 12], vec![1_u8; 16]);
    let how = mean(FloatDtype::F32, 2, false);
    let mut output = vec![0x77; 16];
    let error =
        reduce_mean_slices(InstructionSet::active(), how, &[&long, &short], &mut output, None);
    let expected = ReduceError::Length { buffer: Buffer::Input(1), bytes: 12, expected_bytes: 16 };
    assert_eq!(error, Err(expected));
    let mut second = vec![0x77; 8];
    let copy_to = Some(second.as_mut_slice());
    let error = reduce_mean_slices(InstructionSet::active(), how, &[&long], &mut output, copy_to);
    assert_eq!(
        error.unwrap_err().to_string(),
        "the second output has 8 bytes where the output asks for 16: pass equal ranges"
    );
    let error = reduce_mean_slices(InstructionSet::active(), how, &[], &mut output[..6], None);
    assert_eq!(error, Err(ReduceError::BrokenElement { dtype: FloatDtype::F32, bytes: 6 }));
    assert!(output.iter().chain(&second).all(|byte| *byte == 0x77));
}
