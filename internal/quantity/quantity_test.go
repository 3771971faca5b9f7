package quantity

import "testing"

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "4096": 4096, "50Mi": 50 << 20, "2M": 2e6, "1k": 1000, "1Ki": 1024, "8191Ti": 8191 << 40, "9223372036854775807": 1<<63 - 1,
		"": 0, "0": 0, "-1": 0, "1.5": 0, "Mi": 0, "1 Mi": 0, "1mi": 0, "1K": 0, "1Ei": 0, "max": 0, "9223372036854775808": 0, "8388608Ti": 0, "0x10": 0,
	} {
		if have := Parse(text); have != want {
			t.Errorf("%q is %d, want %d", text, have, want)
		}
	}
}
