// Package port is the one port that agents have, for other parts of the driver to call them on: gRPC over TLS 1.3.
//
// Each side knows the other one without a certificate authority. An agent makes its key when it starts, keeps it in memory, and
// writes the fingerprint of it into the status of its pools, which nobody else may write (guard.yaml): callers take no other key. A
// caller has a token of its service account that is for this one agent, and the agent asks the API server whose it is.
//
// docs/decisions/agents-port.md says why.
package port

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"math/big"
	"net"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Listener is an agent's port, which has the agent's key.
type Listener struct {
	net.Listener
	certificate tls.Certificate
}

// Listen opens a port, as IP:PORT: an address that others can reach, as it is told to them. ErrInvalid if it is none.
func Listen(address string) (*Listener, error) {
	if err := CheckAddress(address); err != nil {
		return nil, err
	}
	certificate, err := newCertificate()
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return &Listener{listener, certificate}, nil
}

// CheckAddress is ErrInvalid for what is no IP:PORT that others could reach.
func CheckAddress(address string) error {
	host, _, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && (ip == nil || ip.IsUnspecified()) {
		err = fmt.Errorf("%q is not the address of one machine", host)
	}
	if err != nil {
		return fmt.Errorf("%w: %q: give the IP address of this pod or node, at which others reach it, and a port, as 10.0.0.7:9812 or [fd00::7]:9812: %w", errdefs.ErrInvalid, address, err)
	}
	return nil
}

// Endpoint is what callers have to know of the port; nil if there is none.
func (l *Listener) Endpoint() *v1alpha1.AgentEndpoint {
	if l == nil {
		return nil
	}
	return &v1alpha1.AgentEndpoint{Address: l.Addr().String(), Fingerprint: fingerprint(l.certificate.Leaf)}
}

// Close closes the port, also if nobody serves it; there may be none.
func (l *Listener) Close() {
	if l != nil {
		_ = l.Listener.Close() // it may be closed
	}
}

// newCertificate makes a key, and a certificate that says nothing but it: nobody looks at its names and dates.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// fingerprint is the SHA-256 of a certificate's key (its SubjectPublicKeyInfo, as RFC 7469 has it), in hex.
func fingerprint(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// only is the TLS configuration of a caller that takes one key.
func only(want string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // by names and authorities: the key is all that counts, and it is looked at next
		VerifyConnection: func(state tls.ConnectionState) error {
			if have := fingerprint(state.PeerCertificates[0]); have != want {
				return fmt.Errorf("who answers has the key %s, and the agent %s", have, want)
			}
			return nil
		},
	}
}
