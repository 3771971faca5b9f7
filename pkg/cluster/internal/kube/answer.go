package kube

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// answering is a transport that fails with ErrUnavailable if the answer "404 not found" does not tell that an object is gone: the API server does not know
// the kind of objects, as its definition is missing, or the answer comes from a proxy before the API server. To client-go these look as if the object were
// gone, and so a volume would be taken for deleted, and a node for gone for good.
type answering struct{ http.RoundTripper }

// mostSaid is how many bytes of such an answer are put into the error.
const mostSaid = 256

func (a answering) RoundTrip(q *http.Request) (*http.Response, error) {
	answer, err := a.RoundTripper.RoundTrip(q)
	// For an object that is gone the API server answers with a Status, in JSON or protobuf.
	if err != nil || answer.StatusCode != http.StatusNotFound || strings.HasPrefix(answer.Header.Get("Content-Type"), "application/") {
		return answer, err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(io.LimitReader(answer.Body, mostSaid))
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	return nil, fmt.Errorf("%w: the API server has no such kind of objects (%q): if it is one of ashlar.dev, apply the definitions of this driver's version (deploy/kubernetes/crds)",
		errdefs.ErrUnavailable, strings.TrimSpace(string(said)))
}
