// Package persistenttest writes blocks of metadata as the kernel's library persistent-data does, for tests of those who read them.
package persistenttest

import (
	"encoding/binary"
	"hash/crc32"
	"os"
)

const block = 4096

// Write writes a block, with its number at an offset and with its checksum, into which sum is mixed.
func Write(f *os.File, number uint64, b []byte, numberAt int, sum uint32) error {
	b = append(b, make([]byte, block-len(b))...)
	binary.LittleEndian.PutUint64(b[numberAt:], number)
	binary.LittleEndian.PutUint32(b, ^crc32.Checksum(b[4:], crc32.MakeTable(crc32.Castagnoli))^sum)
	_, err := f.WriteAt(b, int64(number)*block)
	return err
}

// Node writes a node of a tree. All values have the same size; without any, it is 8 bytes.
func Node(f *os.File, number uint64, leaf bool, keys []uint64, values [][]byte) error {
	flags, most, size := uint32(1), len(keys)+1, 8
	if leaf {
		flags = 2
	}
	if len(values) > 0 {
		size = len(values[0])
	}
	b := words(0, flags, 0, 0, uint32(len(keys)), uint32(most), uint32(size), 0)
	for _, key := range keys {
		b = binary.LittleEndian.AppendUint64(b, key)
	}
	b = append(b, make([]byte, 8*(most-len(keys)))...)
	for _, value := range values {
		b = append(b, value...)
	}
	return Write(f, number, b, 8, 121107)
}

// Array writes a block of an array, with values of a size in bytes.
func Array(f *os.File, number uint64, size int, values ...byte) error {
	b := words(0, uint32((block-24)/size), uint32(len(values)/size), uint32(size), 0, 0)
	return Write(f, number, append(b, values...), 16, 595846735)
}

func words(all ...uint32) (b []byte) {
	for _, word := range all {
		b = binary.LittleEndian.AppendUint32(b, word)
	}
	return b
}
