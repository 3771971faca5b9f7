package machine

import "testing"

func TestSize(t *testing.T) {
	for bytes, want := range map[int64]string{0: "0 B", 512: "512 B", 999: "999 B", 1000: "1 KiB", 1536: "1.5 KiB",
		64 << 20: "64 MiB", 1000 << 20: "1 GiB", 100<<30 + 512<<20: "100 GiB", 16 << 40: "16 TiB"} {
		if got := Size(bytes); got != want {
			t.Errorf("size(%d) is %q, expected %q", bytes, got, want)
		}
	}
}

func TestWithin(t *testing.T) {
	for _, test := range []struct {
		path, above string
		want        bool
	}{
		{"/a", "/a", true}, {"/a/b", "/a", true}, {"/ab", "/a", false}, {"/a", "/a/b", false}, {"/a", "/", true}, {"/", "/", true},
	} {
		if got := Within(test.path, test.above); got != test.want {
			t.Errorf("within(%q, %q) is %v", test.path, test.above, got)
		}
	}
}

func TestUnescape(t *testing.T) {
	if got := unescape(`/a\040b\134040\011`); got != "/a b\\040\t" {
		t.Errorf("%q", got)
	}
}
